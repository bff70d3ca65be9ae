# For who teaches with it: handing out and grading. A handout lacks it.

# SUBMISSIONS    folders that make grade judges: each NAME.cu and NAME/mgpu.cu in them
# ONLY           the part that make grade counts: sums, bits or host
# ISOLATE        0: grade even where nothing keeps a submission from your files and the others
# DIR            folder that make handout creates, or make page (by default build/page)
# HIDE           algorithms that it leaves out, by default all of extras/algorithms/

.PHONY: handout grade

handout:  ## copy the project to DIR for students, without the solutions or HIDE
	@python3 extras/exercise/handout.py $(words)

# Any .cu, in a folder of its own
compile_submission = $(to_worker) -DSUBMISSION='"@SUBMISSION@"' -o @WORKER@
grade: $(worker_needs)
grade: backend build/cpu/judge  ## judge each submission in SUBMISSIONS by itself: build/grades
	@python3 extras/exercise/grade.py COMPILER='$(subst ','\'',$(compile_submission))' \
	    $(if $(filter build/cpu,$(dir)),TRANSLATE='sh extras/cpu/to_cpp.sh') $(words)
