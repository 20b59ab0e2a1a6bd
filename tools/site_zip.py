"""Pack the built site as one zip that opens from disk.

usage: site_zip.py SITE ZIP
"""

import sys
import zipfile
from pathlib import Path

# What only the build reads, and MathJax's spoken and collapsible formulas, which no page loads.
LEFT_OUT = (".buildinfo", "objects.inv", ".doctrees", "_static/mathjax/sre", "_static/mathjax/a11y")


def main(site, target):
    site = Path(site)
    if not (site / "index.html").is_file():
        sys.exit(f"no site in {site}: run make book first")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as zipped:
        for path in sorted(p for p in site.rglob("*") if p.is_file()):
            name = path.relative_to(site).as_posix()
            if not name.startswith(LEFT_OUT):
                zipped.write(path, f"gpt2-to-k3/{name}")
    print(f"wrote {target}, {Path(target).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:])
