import sys

import pytest
from classroom import run


@pytest.fixture(scope="session")
def editions(tmp_path_factory):
    """The folder that `make student` fills."""
    folder = tmp_path_factory.mktemp("student")
    run(sys.executable, "exercises/student.py", "--to", str(folder))
    return folder
