"""Adapters that train tasks with other libraries instead of Sunspot's own loop in PyTorch.

A task's module selects its library by defining a function such as `build_keras`. `sunspot.tasks.load_task` looks the
function up in ADAPTERS, and calls the adapter with the module and the settings.

To write an adapter:
1. Write a module here with a subclass of `sunspot.tasks.Task`, and add it to ADAPTERS below. The program
   needs no other change. The library's extra belongs in pyproject.toml.
2. Define `build_model`, which returns a `torch.nn.Module`. Checkpoints hold its state_dict, so wrap another library's
   model in a module with a `get_extra_state` and a `set_extra_state` for the library's variables (keras.py).
3. Define `build_optimizer`. If the library has its own optimizer, return `build_empty_optimizer` (tasks/defaults.py).
4. Choose how the steps are taken. Either define `train(run)`, which loops over `run.batches()` (keras.py). It calls
   `run.optimizer.step()` before anything changes the model's state, because that call waits until a checkpoint has
   copied the state. Or, if the library has a Trainer with a loop of its own, define `library_loop(worker)` with a
   `sunspot.train.run.LibraryRun` (lightning_loop.py). It calls `before_change` before each optimizer step, and
   `end_step` after each step.
5. If a Ray trainer other than TorchTrainer must start the workers, define `find_ray_trainer`. A task with
   `find_ray_trainer` or `library_loop` restarts all workers after a loss. With any other task, the workers that are
   left keep training, so its `train(run)` must take every step through `run`.
6. List the functions in a task's module that the library never calls in the class attribute `uncalled`. Pass the
   settings that the library ignores to `Task.__init__` as `unread`. Both map a name to the reason.

Adapters import from everything below `tune/`, and nothing imports them, because `load_task` finds them
by name. A library is imported only for the tasks that use it.
"""

from typing import NamedTuple


class Adapter(NamedTuple):
    """An adapter for a library, and the packages that it needs."""

    location: str
    "The module and the name of the `Task` subclass."
    extra: str
    "The extra of sunspot-train that installs the packages."
    packages: tuple[str, ...]
    "The packages that tasks for this library may import."


ADAPTERS = {
    "build_module": Adapter(
        "sunspot.adapters.lightning:LightningTask", "lightning", ("lightning", "pytorch_lightning", "torchmetrics")
    ),
    "build_keras": Adapter("sunspot.adapters.keras:KerasTask", "tensorflow", ("keras", "tensorflow")),
    "build_trainer": Adapter(
        "sunspot.adapters.transformers:TrainerTask", "hf", ("huggingface_hub", "peft", "tokenizers", "transformers")
    ),
    "build_trees": Adapter("sunspot.adapters.boosted_trees:TreesTask", "trees", ("lightgbm", "xgboost")),
}
"""The adapters, keyed by the function that selects the library. A task defines at most one of these functions."""
