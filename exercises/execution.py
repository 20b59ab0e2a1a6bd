"""How nbgrader runs a submission here, and what its feedback leaves out. Used by nbgrader_config.py."""

import copy

import bleach
import jinja2
from nbclient.exceptions import DeadKernelError
from nbconvert.exporters import HTMLExporter
from nbconvert.preprocessors.sanitize import SanitizeHTML
from nbformat.v4 import new_output
from nbgrader import utils
from nbgrader.preprocessors import ClearHiddenTests, Execute, NbGraderPreprocessor

# What a student's text may be on a page, which opens beside the gradebook: no scripts in any form.
TAGS = bleach.ALLOWED_TAGS | set("p br hr h1 h2 h3 h4 h5 h6 pre sup sub img div span".split())
TAGS |= set("table thead tbody tr th td".split())
ATTRIBUTES = bleach.ALLOWED_ATTRIBUTES | {"img": ["src", "alt"], "th": ["align"], "td": ["align"]}
PRINTED = 200_000  # characters kept of what one cell prints


class ExecuteApart(Execute):
    """A cell that ends its kernel, or does not end, fails alone.

    A new kernel then runs the cells before it, without those that failed so, and goes on behind it.
    """

    shutdown_kernel = "immediate"

    def preprocess(self, nb, resources, km=None):
        self.lost, self.printed = set(), {}
        return super().preprocess(nb, resources, km)

    def preprocess_cell(self, cell, resources, index):
        try:
            cell, resources = super().preprocess_cell(cell, resources, index)
        except DeadKernelError:
            what = "The cell ended its kernel: too much memory, too many processes, or on purpose."
            cell.outputs = [
                new_output("error", ename="DeadKernelError", evalue=what, traceback=[what])
            ]
            self.go_on_without(index)
        else:
            if any(o.get("ename") == "CellTimeoutError" for o in cell.get("outputs", [])):
                self.go_on_without(index)
        if utils.is_grade(cell) and utils.is_locked(cell):
            # A value would count as partial credit, and a thread of the submission could send one.
            kept = ("error", "stream")
            cell.outputs = [o for o in cell.outputs if o.output_type in kept]
        return cell, resources

    def go_on_without(self, index):
        self.lost.add(index)
        kept = self.nb.cells[:index]
        while True:
            self.new_kernel()
            try:
                for i, cell in enumerate(copy.deepcopy(kept)):
                    if i not in self.lost:
                        super().preprocess_cell(cell, self.resources, i)
            except DeadKernelError:
                self.lost.add(i)
            else:
                break
        self.nb.cells[:index] = kept

    def new_kernel(self):
        self._cleanup_kernel()
        self.km = self.create_kernel_manager()
        self.start_new_kernel(cwd=self.resources.get("metadata", {}).get("path") or None)
        self.start_new_kernel_client()

    def output(self, outs, msg, display_id, cell_index):
        """Keep what a cell prints up to a limit: printing without end must not fill this process."""
        self.printed[cell_index] = self.printed.get(cell_index, 0) + len(str(msg["content"]))
        if self.printed[cell_index] < PRINTED or msg["msg_type"] == "error":
            return super().output(outs, msg, display_id, cell_index)
        return None


class HideTests(NbGraderPreprocessor):
    """Hidden tests stay out of feedback, and so do tracebacks that quote them; their message stays."""

    def preprocess_cell(self, cell, resources, index):
        if cell.cell_type == "code" and utils.is_grade(cell) and utils.is_locked(cell):
            hidden = ClearHiddenTests(parent=self)
            if hidden._remove_hidden_test_region(cell):
                for output in cell.outputs:
                    if output.output_type == "error":
                        output.traceback = [f"{output.ename}: {output.evalue}"]
        return cell, resources


class SafeOutputs(SanitizeHTML):
    """Outputs without scripts; texts are made safe as pages are written."""

    enabled = True

    def preprocess_cell(self, cell, resources, index):
        if cell.cell_type == "code":
            return super().preprocess_cell(cell, resources, index)
        return cell, resources


@jinja2.pass_context
def safe_markdown(context, source):
    """nbconvert's filter, without scripts."""
    page = HTMLExporter().markdown2html(context, source)
    # Images that are attached to a cell have become data.
    protocols = bleach.ALLOWED_PROTOCOLS | {"data"}
    return bleach.clean(page, tags=TAGS, attributes=ATTRIBUTES, protocols=protocols)
