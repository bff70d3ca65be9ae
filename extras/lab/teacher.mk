# For who teaches with it: handing out, grading, and how good the checks are. A handout lacks it.

# SUBMISSIONS    folders that make grade judges: each NAME.cu and NAME/mgpu.cu in them
# ONLY           the part that make grade counts: sums, bits or host
# DIR            folder that make handout creates, or make page (by default build/page)
# HIDE           algorithms that it leaves out, by default all of extras/algorithms/
# NAMES          mistakes that make plant tries: parts of their names; by default all
own += NAMES

.PHONY: handout grade plant

handout:  ## copy the project to DIR for students, without the solutions or HIDE
	@python3 extras/lab/handout.py $(words)
plant:  ## plant the mistakes of extras/lab/mistakes.txt: do make run and make check explain them?
	@python3 extras/lab/plant.py try $(NAMES)

# Any .cu, in a folder of its own
ifeq ($(dir),build/gpu)
compile_submission = $(worker_gpu) -DSUBMISSION='"@SUBMISSION@"' extras/lab/worker.cu -o @WORKER@
else
compile_submission = $(compile_worker) -DSUBMISSION='"@SUBMISSION@"' -x c++ \
    build/cpp/extras/lab/worker.cu -o @WORKER@
grade: $(compiled_once) $(call lab_cpp,worker) build/cpp/mgpu.cu $(algorithms_cpp) \
    build/cpp/extras/lab/wrong/yours.h
endif
grade: backend build/cpu/judge  ## judge each submission in SUBMISSIONS by itself: build/grades
	@python3 extras/lab/grade.py $(if $(filter build/cpu,$(dir)),TRANSLATE=extras/cpu/to_cpp.sed) \
	    COMPILER='$(subst ','\'',$(compile_submission))' $(words)

# Copies of mgpu.cu and its parts with planted mistakes, and program.cu, which includes them
planted := program.cu $(filter-out extras/fast/% extras/files/%,$(needs))
.PRECIOUS: build/cpp/build/plant/%
build/plant/%/check: $(addprefix build/cpp/build/plant/%/,$(planted)) $(call lab_cpp,plant) \
    build/cpp/extras/lab/check.cu build/cpu/flags $(compiled_once)
	@echo $@
	@$(CXX) $(cpu_flags) -w -iquote extras/lab $(once_cpu) \
	    -DPROGRAM='"../../build/plant/$*/program.cu"' -x c++ build/cpp/extras/lab/plant.cu $(to)
build/cpp/build/plant/%: build/plant/% extras/cpu/to_cpp.sed
	@$(translate)
