# What the notebook builds, and its test. The Makefile includes this file where it is there.

.PHONY: notebook_program notebook_judge notebook_test
notebook_program: $(program) data
notebook_judge: $(worker) build/cpu/judge

notebook_test: build/notebook_venv/tests.txt data  ## test the notebook, and cells of a student
	@env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL build/notebook_venv/bin/python -Bm pytest -q \
	    -p no:cacheprovider extras/notebook/tests.py
