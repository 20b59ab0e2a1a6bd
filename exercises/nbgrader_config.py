"""nbgrader's configuration for `make student` and `make grade`; also read by nbgrader run in this folder."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from execution import ExecuteApart, HideTests, SafeOutputs, safe_markdown  # noqa: E402
from nbconvert.preprocessors import CSSHTMLHeaderPreprocessor  # noqa: E402
from nbgrader.converters import Autograde  # noqa: E402
from nbgrader.preprocessors import Execute, GetGrades  # noqa: E402

c = get_config()  # noqa: F821, given by traitlets
c.CourseDirectory.course_id = "gpt2-to-k3"
c.CourseDirectory.root = str(HERE.parent / "grading")
c.CourseDirectory.source_directory = str(HERE / "source")

default = Autograde.autograde_preprocessors.default_args[0]
c.Autograde.autograde_preprocessors = [ExecuteApart if p is Execute else p for p in default]
# A submission's scripts would run in the instructor's browser, beside the gradebook.
c.Autograde.autograde_preprocessors.append(SafeOutputs)
c.HTMLExporter.filters = {"markdown2html": safe_markdown}
# A deleted test is put back, as a changed one is.
c.OverwriteCells.add_missing_cells = True
c.ExecuteApart.timeout = 60
# Printing faster than it can be read is not an error of the grader.
c.ExecuteApart.raise_on_iopub_timeout = False
c.GenerateFeedback.preprocessors = [GetGrades, HideTests, CSSHTMLHeaderPreprocessor]
