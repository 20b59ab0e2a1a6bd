"""Sphinx extension: the directive {claims} makes the claims page from data/claims.yml.

`load` checks that file and names the entry and the field of each fault; `find` says what a check in it points to.
"""

import ast
import html
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import quote

import yaml
from docutils import nodes
from jinja2 import Environment
from markupsafe import Markup
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[1]
DATA = "src/gpt2_to_k3/data"
VERDICTS = ("holds", "simplified", "wrong", "not verifiable here")
UNKNOWN = VERDICTS[-1]  # the one verdict that may stand without a check
SOURCE_FIELDS = ("label", "author", "title", "language", "published")
FIELDS = {
    "id": str, "subject": str, "claim": str, "said_by": list, "verdict": str, "evidence": str,
    "shown_by": list,
}  # fmt: skip


def load(path=ROOT / DATA / "claims.yml"):
    """The sources, subjects and claims of a file; ValueError with a line for each fault."""
    data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    found = [f"{Path(path).name}: {fault}" for fault in faults(data)]
    if found:
        raise ValueError("\n".join(found))
    return data


def faults(data):
    """Yield 'entry: field: what is wrong'."""
    for key, source in data["sources"].items():
        for field in SOURCE_FIELDS:
            if not isinstance(source.get(field), str):
                yield f"source {key}: {field}: missing, or not text"
    ids, subjects = Counter(c.get("id") for c in data["claims"]), data["subjects"]
    last = 0
    for number, claim in enumerate(data["claims"], 1):
        name = claim.get("id") or f"claim {number}"
        wrong = [f for f, kind in FIELDS.items() if not isinstance(claim.get(f), kind)]
        wrong += [f for f in FIELDS if f in claim and f != "shown_by" and not claim[f]]
        yield from (f"{name}: {field}: missing, empty or of a wrong type" for field in wrong)
        yield from (f"{name}: {field}: unknown field" for field in claim.keys() - FIELDS)
        if wrong:
            continue
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) or ids[name] > 1:
            yield f"{name}: id: not a slug, or used twice"
        if claim["subject"] not in subjects:
            yield f"{name}: subject: {claim['subject']!r} is not one of {', '.join(subjects)}"
        elif subjects.index(claim["subject"]) < last:
            yield f"{name}: subject: {claim['subject']!r} comes after a later subject"
        else:
            last = subjects.index(claim["subject"])
        if claim["verdict"] not in VERDICTS:
            yield f"{name}: verdict: {claim['verdict']!r} is not one of {', '.join(VERDICTS)}"
        for said in claim["said_by"]:
            if not isinstance(said, dict) or said.keys() != {"source", "where"}:
                yield f"{name}: said_by: {said!r} is not a source and where"
            elif said["source"] not in data["sources"]:
                known = ", ".join(data["sources"])
                yield f"{name}: said_by: {said['source']!r} is not one of {known}"
        if not claim["shown_by"] and claim["verdict"] != UNKNOWN:
            yield f"{name}: shown_by: a claim with this verdict needs a check"
        for check in claim["shown_by"]:
            try:
                find(check)
            except ValueError as error:
                yield f"{name}: shown_by: {error}"


def find(check):
    """What a check names: its kind, file (from the root), text, and a line, heading or key; else ValueError."""
    if "::" in check:
        file, name = check.split("::", 1)
        if name not in tests(file):
            raise ValueError(f"no test {name} in {file}")
        text = name.removeprefix("test_").replace("_", " ")
        return {"kind": "test", "file": file, "line": tests(file)[name], "text": text}
    if check.startswith("book/"):
        file, _, place = check.partition("#")
        heading, _, phrase = place.partition(" > ")
        if heading not in sections(file):
            raise ValueError(f"no section {heading!r} in {file}")
        if phrase not in sections(file)[heading]:
            raise ValueError(f"section {heading!r} of {file} does not say {phrase!r}")
        number = re.match(r"ch(\d+)", Path(file).name)
        page = f"chapter {int(number[1])}" if number else Path(file).stem
        text = f"{page}, {heading}" + (f": {phrase}" if phrase else "")
        return {"kind": "section", "file": file, "heading": heading, "text": text}
    if check.startswith("data/"):
        file = f"{DATA}/{check.removeprefix('data/')}"
        if not (ROOT / file).is_file():
            raise ValueError(f"no file {file}")
        return {"kind": "record", "file": file, "text": Path(file).name}
    if check not in references():
        raise ValueError(f"no entry {check} in book/references.bib")
    return {"kind": "source", "file": "book/references.bib", "key": check, "text": check}


@cache
def tests(file):
    """Name -> line of the tests that a file defines, or imports to run them."""
    path = ROOT / file
    tree = ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")
    named = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.alias)]
    return {x.name: x.lineno for x in named if x.name.startswith("test_")}


@cache
def sections(file):
    """Heading -> text of the sections of a notebook, up to the next heading of any level."""
    path, found = ROOT / file, {}
    if not path.is_file():
        return found
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    prose = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    for _, heading, text in re.findall(
        r"^(#+) (.*)$((?:\n(?!#+ ).*)*)", re.sub(r"```.*?```", "", prose, flags=re.S), flags=re.M
    ):
        found[heading.strip()] = text
    return found


@cache
def references():
    text = (ROOT / "book/references.bib").read_text(encoding="utf-8")
    return set(re.findall(r"^@\w+\{([^,]+),", text, flags=re.M))


# The page. What links to other pages is made when all of them are known.


def code(text):
    """Escape a text, and set what stands in backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False)))


templates = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
templates.filters["code"] = code
templates.globals["verdicts"] = VERDICTS

SOURCES = """
<dl class="claims-sources">
{% for key, source in sources.items() %}
<dt>{{ source.label }}</dt>
<dd>{% if source.url %}<a href="{{ source.url }}">{{ source.title }}</a>.{% else %}{{ source.title }}.{% endif %}
 {{ source.author }}. In {{ source.language }}. {{ source.published }}.</dd>
{% endfor %}
</dl>
"""

SUMMARY = """
<table class="claims-summary">
<thead><tr><th scope="col">verdict</th>
{% for source in sources.values() %}<th scope="col">{{ source.label }}</th>{% endfor %}
<th scope="col">all texts</th></tr></thead>
<tbody>
{% for verdict in verdicts %}
<tr><th scope="row">{{ verdict }}</th>
{% for key in sources %}<td>{{ count[verdict, key] }}</td>{% endfor %}
<td>{{ count[verdict, ""] }}</td></tr>
{% endfor %}
</tbody></table>
"""

FILTER = """
<form class="claims-filter" hidden>
<label>Verdict <select name="verdict"><option value="">all</option>
{% for verdict in verdicts %}<option>{{ verdict }}</option>{% endfor %}</select></label>
<label>Said by <select name="source"><option value="">anyone</option>
{% for key, source in sources.items() %}<option value="{{ key }}">{{ source.label }}</option>{% endfor %}</select></label>
<label>Subject <select name="subject"><option value="">all</option>
{% for subject in subjects %}<option>{{ subject }}</option>{% endfor %}</select></label>
<label>With the words <input type="search" name="words"></label>
<button type="reset">Show all</button>
</form>
<p class="claims-count" role="status" aria-live="polite">{{ claims | length }} claims</p>
"""

ROWS = """
<table class="claims-table" role="table" aria-label="Claims: {{ subject }}">
<thead role="rowgroup"><tr role="row">
<th role="columnheader" scope="col">claim, and who says it</th>
<th role="columnheader" scope="col">verdict</th>
<th role="columnheader" scope="col">evidence, and what shows it</th></tr></thead>
<tbody role="rowgroup">
{% for claim in claims %}
<tr role="row" id="{{ claim.id }}" data-verdict="{{ claim.verdict }}" data-subject="{{ subject }}"
 data-sources="{{ claim.said_by | map(attribute='source') | unique | join(' ') }}">
<td role="cell"><p>{{ claim.claim | code }}
<a class="claims-link" href="#{{ claim.id }}" aria-label="Link to the claim {{ claim.id }}">#</a></p>
<ul>{% for said in claim.said_by %}<li><b>{{ sources[said.source].label }}</b>: {{ said.where }}</li>
{% endfor %}</ul></td>
<td role="cell"><span class="claims-verdict" data-verdict="{{ claim.verdict }}">{{ claim.verdict }}</span></td>
<td role="cell"><p>{{ claim.evidence | code }}</p>
{% if claim.shown_by %}<ul class="claims-shown" aria-label="Shown by">{% for check in claim.shown_by %}
<li>{{ check.kind }}: <a href="{{ check.href }}" title="{{ check.file }}">{{ check.text }}</a></li>
{% endfor %}</ul>{% endif %}</td></tr>
{% endfor %}
</tbody></table>
"""


class claims_table(nodes.General, nodes.Element):
    """The claims of one subject, until the addresses of all pages are known."""


class Claims(SphinxDirective):
    """{claims} with one of the parts: sources, summary, table."""

    required_arguments = 1

    def run(self):
        try:
            data = load()
        except ValueError as error:
            raise self.error(str(error)) from error
        checks = {find(check)["file"] for c in data["claims"] for check in c["shown_by"]}
        for file in (f"{DATA}/claims.yml", "tools/claims.py", *checks):
            self.env.note_dependency(str(ROOT / file))
        if self.arguments[0] != "table":
            count = Counter(
                (claim["verdict"], key)
                for claim in data["claims"]
                for key in {"", *(said["source"] for said in claim["said_by"])}
            )
            template = {"sources": SOURCES, "summary": SUMMARY}[self.arguments[0]]
            return [raw(template, **data, count=count)]
        result = [raw(FILTER, **data)]
        for subject in data["subjects"]:
            claims = [c for c in data["claims"] if c["subject"] == subject]
            section = nodes.section("", nodes.title("", subject), names=[subject.lower()])
            section += claims_table("", subject=subject, claims=claims, sources=data["sources"])
            self.state.document.note_implicit_target(section)
            result.append(section)
        return result


def raw(template, **values):
    return nodes.raw("", templates.from_string(template).render(values), format="html")


def fill_tables(app, doctree, docname):
    for node in list(doctree.findall(claims_table)):
        claims = [
            claim | {"shown_by": [link(app, docname, check) for check in claim["shown_by"]]}
            for claim in node["claims"]
        ]
        values = {"subject": node["subject"], "sources": node["sources"], "claims": claims}
        node.replace_self(raw(ROWS, **values))


def link(app, docname, check):
    """A check as the page shows it: kind, text and address."""
    found, options = find(check), app.config.html_theme_options
    if found["kind"] == "section":
        page = str(Path(found["file"]).with_suffix(""))
        headings = app.env.tocs[page].findall(nodes.reference)
        # Sphinx sets an apostrophe as a quote.
        anchors = {x.astext().replace("’", "'"): x["anchorname"] for x in headings}
        anchor = anchors.get(found["heading"])
        if anchor is None:
            raise ExtensionError(f"claims: the page {page} has no heading {found['heading']!r}")
        found["href"] = app.builder.get_relative_uri(docname, page) + anchor
    elif found["kind"] == "source":
        cited = [c for c in app.env.get_domain("cite").citations if c.key == found["key"]]
        if not cited:
            raise ExtensionError(f"claims: {check} is on no page with a bibliography")
        uri = app.builder.get_relative_uri(docname, cited[0].bibliography_key.docname)
        found["href"] = f"{uri}#{cited[0].citation_id}"
        found["text"] = re.sub(r"[{}]", "", cited[0].entry.fields["title"])
    else:
        url, branch = options["repository_url"], options["repository_branch"]
        line = f"#L{found['line']}" if "line" in found else ""
        found["href"] = f"{url}/blob/{branch}/{quote(found['file'])}{line}"
    return found


def add_script(app, pagename, templatename, context, doctree):
    if "claims-filter" in context.get("body", ""):
        app.add_js_file("claims.js", loading_method="defer")


def setup(app):
    app.add_node(claims_table)
    app.add_directive("claims", Claims)
    app.connect("doctree-resolved", fill_tables)
    app.connect("html-page-context", add_script)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
