"""The course as nbgrader sees it: shared by student.py and grade.py."""

import os
import sys
import warnings
from pathlib import Path

from nbgrader.apps import NbGraderAPI
from sqlalchemy.exc import SAWarning
from traitlets.config import PyFileConfigLoader

HERE = Path(__file__).resolve().parent


def problem_sets():
    return sorted(path.stem for path in (HERE / "source").glob("*/*.ipynb"))


def course(workspace=None, **more):
    """nbgrader's API with nbgrader_config.py; `more` is {class: {option: value}}."""
    config = PyFileConfigLoader("nbgrader_config.py", path=str(HERE)).load_config()
    if workspace:
        config.CourseDirectory.root = str(Path(workspace).resolve())
    for name, options in more.items():
        config[name].update(options)
    # nbgrader's, on every new submission; nothing follows from them.
    warnings.simplefilter("ignore", SAWarning)
    # nbgrader calls alembic by name, and the environment need not be activated.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    Path(config.CourseDirectory.root).mkdir(parents=True, exist_ok=True)
    return NbGraderAPI(config=config)


def release(api, name):
    """nbgrader's release version of a set, which the gradebook then knows; RuntimeError with its log."""
    result = api.generate_assignment(name, force=True)
    if not result["success"]:
        raise RuntimeError(f"{name}: {result.get('log')}{result.get('error')}")
    return Path(api.coursedir.root, "release", name, f"{name}.ipynb")
