// The filter of the claims page. Without this script every claim is shown, and no form.
const form = document.querySelector(".claims-filter");
const count = document.querySelector(".claims-count");
const rows = [...document.querySelectorAll(".claims-table tbody tr")];
const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));

function show() {
  const { verdict, source, subject, words } = form.elements;
  const wanted = words.value.toLowerCase().split(/\s+/);
  let shown = 0;
  for (const row of rows) {
    const { verdict: v, subject: s, sources } = row.dataset;
    row.hidden = !(
      (!verdict.value || v === verdict.value) &&
      (!subject.value || s === subject.value) &&
      (!source.value || sources.split(" ").includes(source.value)) &&
      wanted.every((word) => texts.get(row).includes(word))
    );
    shown += !row.hidden;
  }
  for (const table of document.querySelectorAll(".claims-table"))
    table.closest("section").hidden = !table.querySelector("tbody tr:not([hidden])");
  count.textContent = `${shown} of ${rows.length} claims`;
}

// A link to a claim, or to a subject, that the filter hides.
function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target && target.closest("[hidden]")) {
    form.reset(); // its reset event comes before the fields are cleared
    setTimeout(() => target.scrollIntoView());
  }
}

form.addEventListener("input", show);
form.addEventListener("reset", () => setTimeout(show));
form.addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", reveal);
addEventListener("pageshow", show); // the browser may have filled the fields
form.hidden = false;
show();
