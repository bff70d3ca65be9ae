# What the notebook builds, and its test. The Makefile includes this file where it is there.

.PHONY: notebook_program notebook_judge notebook_test
notebook_program: $(program) data
notebook_judge: $(worker) build/cpu/judge

notebook_test: build/notebook_venv/tests data  ## test the notebook, and cells of a student
	@env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL build/notebook_venv/bin/python -Bm pytest -q \
	    -p no:cacheprovider extras/notebook/tests.py
notebook_tests = pytest==9.2.0 nbclient==0.11.0 nbconvert==7.17.2 ipykernel==7.4.0 matplotlib==3.11.2
build/notebook_venv/tests: extras/notebook/notebook.mk
	@mkdir -p build; python3 -m venv build/notebook_venv >build/notebook_venv.log 2>&1 || \
	    { echo 'notebook: python3 has no venv: apt-get install python3-venv' >&2; exit 1; }
	@build/notebook_venv/bin/python -m pip install -q $(notebook_tests) >build/notebook_venv.log \
	    2>&1 && touch $@ || \
	    { echo "notebook: pip cannot install: $$(tail -n 1 build/notebook_venv.log)" >&2; exit 1; }
