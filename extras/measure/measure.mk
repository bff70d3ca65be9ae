# Times, counts and pictures. The Makefile includes this file where it is there.

# FABRIC         network for make trace, scale, exercise and show, see extras/measure/README.md
# PROFILE        times of kernels, for make trace with FABRIC, see extras/measure/README.md
# TRACE_MS       width of make trace's picture in milliseconds, by default the time of the steps
# STEPS          steps that make trace and make profile record, by default 3
# STEP_MS        milliseconds of a step on one device, for make scale; by default it is measured
# RUNS           logs that make plot draws, such as 'a.csv b.csv', by default LOG

.PHONY: bench summary trace profile scale plot pictures_venv
own += TRACE_MS

bench: backend $(dir)/measure  ## time BENCH to build/bench.csv
	@$(dir)/measure bench $(words)
trace: backend $(dir)/measure  ## draw when the operations of three steps ran: build/trace.json, .svg
	@$(dir)/measure trace $(words)
	@python3 extras/measure/pictures.py trace build/trace.csv $(value TRACE_MS)
	@echo 'https://ui.perfetto.dev and chrome://tracing show build/trace.json'
profile: backend $(dir)/measure  ## show where the time of a step goes: kernels and copies of each device
	@$(dir)/measure profile $(words)
scale: backend $(dir)/measure  ## predict a step on 1 to 16 devices, on FABRIC
	@$(dir)/measure scale $(words)
	@python3 extras/measure/pictures.py scale || true # the numbers count
summary: backend $(dir)/measure  ## list the network's operators: shapes, parameters, FLOPs, memory
	@$(dir)/measure summary $(words)
plot:  ## draw train loss and test acc of RUNS: build/plot.svg, .png; or print them
	@python3 extras/measure/pictures.py accuracy $(words)
pictures_venv: # for make plot and other pictures, where the system has no matplotlib
	python3 -m venv build/pictures_venv && build/pictures_venv/bin/pip install -q matplotlib

$(eval $(call add_program,measure,watched,extras/measure/measure.cu))
