"""Adapters that train tasks with other libraries instead of Sunspot's own PyTorch loop.

A task's module selects its library by defining a function such as `build_keras`. `sunspot.tasks.load_task` finds the
adapter for this function in ADAPTERS, and calls the adapter with the module and the settings.

To write an adapter:
1. Write a module here with a subclass of `sunspot.tasks.Task`, and add it to ADAPTERS below. Add the
   library as an extra to pyproject.toml and to the image's extras in the Makefile, and run `make lock`. Document the
   adapter in docs/tasks.md.
2. Define `build_model`, which returns a `torch.nn.Module`. Checkpoints contain its state_dict. Wrap the model of
   another library in a module whose `get_extra_state` and `set_extra_state` save and load the model's variables
   (keras.py).
3. Define `build_optimizer`. If the library has its own optimizer, return the result of
   `build_empty_optimizer` (tasks/defaults.py).
4. Define the training loop. If the adapter has its own loop, define `train(run)`, which iterates over `run.batches()`
   (keras.py). `train` must call `run.optimizer.step()` before it changes the model's state, because this call waits
   until a checkpoint has copied the state. If the library has a Trainer with its own loop, define
   `library_loop(worker)`, which passes a `sunspot.train.run.LibraryRun` to the Trainer (lightning_loop.py). The loop
   must call `before_change` before each optimizer step, and `end_step` after each step.
5. If a Ray trainer other than TorchTrainer must start the workers, define `find_ray_trainer`. If a task has
   `find_ray_trainer` or `library_loop`, all workers are restarted after one is lost. With any other task, the
   remaining workers keep training, which requires that the task's `train(run)` takes every step through `run`.
6. In the class attribute `uncalled`, list the functions of a task's module that the library never calls. In the
   argument `unread` of `Task.__init__`, list the settings that the library ignores. Both are mappings from names to
   reasons.

Adapters may import all layers below `tune/`. Nothing imports adapters, because `load_task` finds them by name. A
library is imported only for the tasks that use it.
"""

from typing import NamedTuple


class Adapter(NamedTuple):
    """The location of a library's adapter, and the packages that the library needs."""

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
