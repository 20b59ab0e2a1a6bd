# make book   build the site          make test   test library, notebooks and pages
# make serve  open the built site     make colab  run the notebooks under Colab's versions
# make student  students' editions of the problem sets      make grade SUBMISSIONS=folder  grade what came back
# make marks  give points by hand      make test-grading  test the grading itself
# make dist   wheel, site and student editions, as files to publish, in dist/
# make notebooks  strip outputs, write setup cells and prose.txt      make lock  pin the newest packages      make clean
PYTHON ?= python3
BIN := .venv/bin
COLAB := .venv-colab/bin
# Two kernels share two cores: more threads would only wait for each other.
export OMP_NUM_THREADS := 1
# Pages and tests must not depend on a download.
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# A notebook cache looks at cells alone; pages also depend on the library, its data and the pinned packages.
# The stamp carries their checksum in its name: another checksum, another stamp, and the old build goes.
SOURCES := $(sort $(shell find src -name '*.py' -o -name '*.js' -o -name '*.json')) requirements.txt
STAMP := _build/sources-$(shell cat $(SOURCES) | cksum | tr ' ' '-')

.PHONY: book test serve colab dist student grade marks test-grading notebooks lock clean
# where show_source finds the API page
book: export GPT2_TO_K3_SITE := .
book: .venv/installed $(STAMP)
	$(BIN)/python tools/execute.py
	@# after a failed build sphinx would find nothing to do and pass
	$(BIN)/jupyter-book build . -W -n --keep-going -q || { rm -rf _build/html _build/.doctrees; exit 1; }
	@echo "Built. Open _build/html/index.html, or run: make serve"

test: book
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/pytest -n 2 tests --ignore tests/grading
	$(BIN)/pytest -n 2 --dist loadfile --nbval --nbval-current-env --nbval-cell-timeout=120 book exercises/source

# the README's picture
.github/screenshot.png: book
	$(BIN)/python tools/screenshot.py $@

serve:
	@test -f _build/html/index.html || { echo "No site yet: run 'make book' first."; exit 1; }
	@echo "Serving on http://localhost:8000/book/index.html (stop with Ctrl-C)"
	@(sleep 1; $(PYTHON) -m webbrowser http://localhost:8000/book/index.html >/dev/null 2>&1) &
	@$(PYTHON) -m http.server 8000 --bind 127.0.0.1 --directory _build/html

colab: .venv-colab/installed
	bash tests/colab/run $(COLAB)

dist: book student
	rm -rf dist && mkdir dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python tools/site_zip.py _build/html dist/site.zip
	cp build/student/problem-sets.zip dist/

student: .venv/instructor
	$(BIN)/python exercises/student.py

grade: .venv/instructor
	@test -n "$(SUBMISSIONS)" || { echo "Say where they are: make grade SUBMISSIONS=folder (with STUDENT/ps1.ipynb in it)"; exit 1; }
	$(BIN)/python exercises/grade.py "$(SUBMISSIONS)" $(if $(UNJAILED),--unjailed)

marks: .venv/instructor
	@# nbgrader calls alembic by name, and looks at what is below the root of the server
	cd exercises && PATH="$(CURDIR)/$(BIN):$$PATH" jupyter lab --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/formgrader

test-grading: .venv/instructor
	$(BIN)/pytest tests/grading

notebooks: .venv/installed
	$(BIN)/ruff format --quiet book exercises
	$(BIN)/python tools/notebooks.py book/*.ipynb exercises/source/*/*.ipynb
	$(BIN)/python tools/prose.py

lock:
	rm -rf build/lock && mkdir -p build && $(PYTHON) -m venv build/lock
	build/lock/bin/pip install --upgrade pip
	grep '^torch==' requirements.txt > build/torch.txt    # move torch by hand: its builds differ by platform
	build/lock/bin/pip install -c build/torch.txt --group book --group test ".[notebook,weights]"
	( head -1 requirements.txt; build/lock/bin/pip freeze --exclude gpt2-to-k3 | \
	  sed -e 's/^\(torch==[0-9.]*\).*/\1/' -e "s/^mlx.*/& ; sys_platform == 'linux'/" ) > build/requirements.txt
	mv build/requirements.txt requirements.txt

clean:
	rm -rf _build build

$(STAMP):
	@rm -rf _build && mkdir -p _build && touch $@

.venv/installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -r requirements.txt
	$(BIN)/pip install --no-deps --editable .
	@touch $@

.venv/instructor: .venv/installed requirements-instructor.txt
	$(BIN)/pip install -r requirements-instructor.txt
	@touch $@

.venv-colab/installed: requirements.txt tests/colab/requirements.txt
	$(PYTHON) -m venv .venv-colab
	$(COLAB)/pip install $$(grep '^torch==' requirements.txt) -r tests/colab/requirements.txt
	@touch $@
