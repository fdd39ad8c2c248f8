# `make train` and `make test` need Python 3.11+ and make. Everything else is installed into .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv pip
DATA_ROOT ?= data

# Always write bytecode. Otherwise, each process would compile torch and Ray again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo train tune extras test test-all lint format emulators readers bench bench-gpu bench-failures image wheel cluster cluster-down smoke recovery soak submit render lock sample clean

# Every variable on make's command line is a setting, with or without its prefix, except the target's own variables (OWN). The
# command refuses variables that are not settings.
SETTINGS = $(foreach name,$(filter-out PYTHON $(OWN),$(.VARIABLES)),$(if $(filter command,$(origin $(name))),$(SETTING)))
SETTING = SUNSPOT_$(name:SUNSPOT_%=%)='$(subst ','\'',$($(name)))'
train tune: OWN = EXTRAS
submit render: OWN = BASE IMAGE PROFILE RUN OUTPUT GENERATION CODE QUEUE KUBE_CONTEXT
recovery soak bench-failures: OWN = KUBE_CONTEXT PROFILE IMAGE RECLAIM KILL ADD ADD_HEAD OPTIONS

# For a cluster: make submit PROFILE=gke-spot RUN=mnist
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' app/sunspot/__init__.py)
IMAGE ?= sunspot:$(VERSION)
BASE ?= debian:bookworm-slim
PLATFORM ?= linux/amd64
PROFILE ?= kind
RUN ?= mnist
OUTPUT ?= rendered/$(RUN)
# An IMAGE that was given overrides the profile's image, but the default above does not. CODE and QUEUE only count on make's
# command line, because environment variables of other programs may have these names, too.
RENDER = --profile '$(PROFILE)' --run '$(RUN)' $(if $(filter-out file,$(origin IMAGE)),--image '$(IMAGE)') \
  $(if $(GENERATION),--generation $(GENERATION)) $(call GIVEN,CODE,code) $(call GIVEN,QUEUE,queue)
GIVEN = $(if $(filter command,$(origin $1)),--$2 '$($1)')

help:  ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: .venv/train  ## train, kill a worker, and see that no row is lost: two minutes, no cluster
	@exec env $(SETTINGS) $(BIN)/sunspot demo

train: .venv/train extras  ## train ResNet-18 on real digits with two workers; any setting: make train EPOCHS=3; packages: EXTRAS=trees,hf
	@exec env $(SETTINGS) $(BIN)/sunspot train

tune: .venv/train extras  ## train a run for each of several settings: make tune LEARNING_RATE='loguniform(1e-4,1e-2)'
	@exec env $(SETTINGS) $(BIN)/sunspot tune

test: .venv/dev  ## run the tests that need no cluster, except the slow ones
	$(PYTEST) --durations=15 -m 'not slow'

test-all: .venv/dev  ## run all tests that need no cluster; slow tests start only in the first minutes: make test-all MINUTES=40
	$(PYTEST) --durations=20 --hypothesis-profile=thorough $(if $(MINUTES),--minutes=$(MINUTES))
PYTEST := $(BIN)/python -m pytest -q -n 3 --dist loadgroup

lint: .venv/dev  ## check format, lint, types, import layers, parameter lists and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 app  # refuses files in the locale's encoding; only in preview so far
	$(BIN)/mypy app scripts
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.structure
	$(BIN)/python -m scripts.language
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yaml
	$(BIN)/check-jsonschema --builtin-schema vendor.renovate renovate.json

format: .venv/dev  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/dev  ## run the benchmarks and their yardsticks, and print a table
	@$(SETTINGS) $(BIN)/python -m scripts.bench

bench-gpu: .venv/dev  ## measure a GPU within ten minutes; OUT names the folder of the results, and ON=cpu tries it out
	@$(BIN)/python -m scripts.bench.gpu $(if $(ON),--device $(ON))

image:  ## build the container image: make image IMAGE=registry/sunspot:1; with Lightning, Hugging Face and tracking: EXTRAS=1; without CUDA: HEAD=1; without torch and Ray: SUBMITTER=1; PLATFORM=linux/arm64
	docker build $(if $(PLATFORM),--platform $(PLATFORM)) --build-arg BASE=$(BASE) --build-arg VERSION=$(VERSION) $(if $(EXTRAS),--build-arg LOCK=image-extras.txt) \
	  $(if $(SUBMITTER),--build-arg LOCK=submitter.txt) $(if $(HEAD),--build-arg TORCH=cpu) -f docker/Dockerfile -t $(IMAGE) .

wheel: .venv/dev  ## build the wheel and the source distribution in dist/
	rm -rf dist
	$(BIN)/uv build -q --no-build-isolation --python $(BIN)/python

cluster: .venv/submitter  ## create a cluster on this machine, with operator, bucket and image; needs docker, kind, kubectl and git
	@$(BIN)/python -m scripts.kind up --image '$(IMAGE)'

cluster-down: .venv/submitter  ## delete that cluster and the content of its bucket
	@$(BIN)/python -m scripts.kind down

smoke: .venv/dev  ## run the CPU smoke test on kind, or: make smoke KUBE_CONTEXT=NAME LOAD_IMAGE='COMMAND'
	@KUBE_CONTEXT='$(KUBE_CONTEXT)' LOAD_IMAGE='$(LOAD_IMAGE)' IMAGE='$(IMAGE)' $(BIN)/python -m scripts.smoke

# RECLAIM, KILL, ADD and ADD_HEAD are your own commands, in which {node} stands for the name of a node.
STRIKE = KUBE_CONTEXT='$(KUBE_CONTEXT)' PROFILE='$(PROFILE)' IMAGE='$(IMAGE)' \
  RECLAIM='$(RECLAIM)' KILL='$(KILL)' ADD='$(ADD)' ADD_HEAD='$(ADD_HEAD)'

recovery: .venv/dev  ## measure the cost of losing nodes of a cluster: make recovery KILL='COMMAND {node}' OPTIONS='--fault kill'
	@$(SETTINGS) $(STRIKE) $(BIN)/python -m scripts.recovery $(OPTIONS)

soak: .venv/dev  ## inject incidents for half an hour: make soak RECLAIM='COMMAND {node}' KILL='COMMAND {node}'
	@$(SETTINGS) $(STRIKE) $(BIN)/python -m scripts.soak $(OPTIONS)

bench-failures: .venv/dev  ## compare Sunspot and others under the same losses: make bench-failures KILL='...' OPTIONS='--nodes a,b,c'
	@$(SETTINGS) $(STRIKE) $(BIN)/python -m scripts.failures $(OPTIONS)

submit: .venv/submitter  ## render and submit to the current cluster: make submit PROFILE=gke-spot RUN=mnist; own code: TASK=my_task CODE=.
	@$(SETTINGS) $(BIN)/sunspot submit $(RENDER) $(if $(KUBE_CONTEXT),--context '$(KUBE_CONTEXT)')

render: .venv/submitter  ## write the manifest that submit would apply, for GitOps: make render OUTPUT=rendered/mnist
	@$(SETTINGS) $(BIN)/sunspot render $(RENDER) --output '$(OUTPUT)'

lock: .venv/dev  ## lock the newest dependencies with hashes, and Ray at the version in requirements/ray.in
	$(BIN)/uv pip compile -q --upgrade $(LOCK) requirements/uv.in -o requirements/uv.txt
	$(BIN)/uv pip compile -q --upgrade $(LOCK) pyproject.toml $(CLOUDS) --extra train -o requirements/train.txt
	$(BIN)/uv pip compile -q --upgrade $(LOCK) pyproject.toml $(CLOUDS) -c requirements/train.txt -o requirements/submitter.txt
	$(BIN)/uv pip compile -q --upgrade $(LOCK) pyproject.toml $(CLOUDS) --extra train --extra cluster -c requirements/train.txt --no-emit-package kubernetes -o requirements/image.txt
	$(BIN)/uv pip compile -q --upgrade $(LOCK) pyproject.toml $(CLOUDS) --extra train --extra cluster --extra hf --extra lightning --extra mlflow --extra trees --extra wandb -c requirements/image.txt --no-emit-package kubernetes -o requirements/image-extras.txt
	$(BIN)/uv pip compile -q --upgrade $(LOCK) pyproject.toml $(CLOUDS) --extra train --extra dev -c requirements/train.txt -o requirements/dev.txt
LOCK := --universal --python-version 3.11 --generate-hashes --no-annotate --no-header -c requirements/ray.in
CLOUDS := --extra gcs --extra azure

emulators: .venv/dev  ## install emulators of Google's and Azure's storage for tests, which are skipped otherwise; needs Go and npm
	GOBIN='$(CURDIR)/.venv/emulators' CGO_ENABLED=0 go install github.com/fsouza/fake-gcs-server@v1.56.1
	npm install --silent --no-audit --no-fund --prefix .venv/emulators azurite@3.35.0

readers: .venv/dev  ## install LitData and MosaicML Streaming for the benchmark of readers
	$(UV) install -q --target .venv/readers --no-deps litdata==0.2.76 lightning-utilities==0.15.3 tifffile==2026.3.3 \
	  mosaicml-streaming==0.13.0 brotli==1.2.1 catalogue==2.0.10 cramjam==2.14.0 python-snappy==0.7.3 xxhash==4.1.0 \
	  zstd==1.5.7.2 transformers==4.57.6 huggingface-hub==0.36.2 tokenizers==0.22.2 safetensors==0.8.0 regex==2026.11.15

sample: .venv/dev  ## rebuild the bundled digits from the published files: make sample DATA_ROOT=data
	$(BIN)/python -m scripts.make_sample --data-root $(DATA_ROOT)

clean:  ## remove the installed environment; runs and data are kept
	rm -rf .venv

# uv installs packages in seconds, and pip in minutes. So pip only installs uv, by its hash.
.venv/uv: requirements/uv.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r $<
	@touch $@

# Each of the three environments includes the one before it. The first two compile bytecode while they install, on all
# cores. Otherwise each process of the first run would compile torch and Ray, and the first step would come 13 s later.
INSTALL_OURS = $(UV) install -q --no-deps -e . && $(BIN)/python -m compileall -q app

.venv/submitter: requirements/submitter.txt pyproject.toml .venv/uv
	$(UV) install -q --compile-bytecode --require-hashes -r $<
	@$(INSTALL_OURS)
	@touch $@

.venv/train: requirements/train.txt pyproject.toml .venv/uv
	@test -e .venv/dev || $(UV) install -q --compile-bytecode --require-hashes -r $<
	@$(INSTALL_OURS)
	@touch $@ .venv/submitter

# Extras of pyproject.toml at the locked versions, whose hashes are verified: EXTRAS=trees,hf.
comma := ,
extras: .venv/train
	$(if $(EXTRAS),$(UV) install -q -r pyproject.toml $(patsubst %,--extra %,$(subst $(comma), ,$(EXTRAS))) -c requirements/dev.txt)

.venv/dev: requirements/dev.txt pyproject.toml .venv/uv
	$(UV) install -q --require-hashes -r $<
	@$(INSTALL_OURS)
	@touch $@ .venv/train .venv/submitter
