# mgpu.cu as a page for a browser, and its tests. The Makefile includes this file where it is there.

# DIR            folder that make handout creates, or make page (by default build/page)
page: own += DIR

.PHONY: page page_test
page: build/page_venv/requirements.txt build/cpu/mgpu build/cpp/mgpu.cu data
has_show := $(wildcard extras/exercise/show.html)
ifneq ($(has_show),)
page: show # beside the exercise
page: words += $(if $(value ALLREDUCE),,ALLREDUCE=$(if $(wildcard extras/algorithms),ring,bucket))
page: words += $(if $(value GPUS),,GPUS=4)
endif
page:  ## make a web page of mgpu.cu beside its comments: index.html in DIR
	@folder='$(subst ','\'',$(or $(value DIR),build/page))'; mkdir -p build/page "$$folder" && \
	build/cpu/mgpu GPUS=2 EPOCHS=1 LIMIT=2 >build/page/output && \
	sed -n '/^<!-- explorer/,/^<!-- .explorer/p' $(if $(has_show),build/show.html,/dev/null) \
	    >build/page/explorer && build/page_venv/bin/python extras/page/page.py mgpu.cu \
	    build/cpp/mgpu.cu build/page/output build/page/explorer "$$folder/index.html" -xc++ \
	    -std=c++17 -Iextras/cpu -isystem "$$($(CXX) -print-file-name=include)" && \
	echo "$$folder/index.html"
chromium = $(shell command -v chromium || command -v chromium-browser)
page_test:
	@$(if $(chromium),,echo 'page_test: skipped: no Chromium (apt-get install chromium)'; exit;) \
	$(if $(has_show),$(MAKE) show SUBMISSION=extras/exercise/wrong/counted_twice.cu && \
	    mkdir -p build/page && mv build/show.html build/page/wrong.html &&) \
	$(MAKE) page build/page_venv/tests.txt DIR= && \
	FILES='build/page/index.html $(if $(has_show),build/show.html build/page/wrong.html)' \
	    CHROMIUM=$(chromium) build/page_venv/bin/python -Bm pytest -qp no:cacheprovider extras/page/tests.py
