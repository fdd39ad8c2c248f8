"""Suggests a valid command, option or setting for an unknown name.

The suggestion is either a name with a similar spelling, or Sunspot's equivalent of a name that other programs use, such
as `stop` for `kill`.
"""

from collections.abc import Iterable, Mapping

LIKENESS = 0.6
"""Minimum similarity of a suggested name. This is the default of `difflib`. `ps` is not similar enough to `stop`."""

MIN_BEGINNING = 3
"""Minimum length of a prefix for which the full name is suggested."""

NO_OTHER_NAMES: Mapping[str, str] = {}

OTHER_VERBS = {
    **dict.fromkeys(("ls", "ps", "runs"), "list"),
    **dict.fromkeys(("show", "info", "describe"), "status"),
    **dict.fromkeys(("run", "start", "fit"), "train"),
    **dict.fromkeys(("apply", "launch"), "submit"),
    **dict.fromkeys(("cancel", "kill", "pause"), "stop"),
    **dict.fromkeys(("continue", "restart"), "resume"),
    **dict.fromkeys(("rm", "remove"), "delete"),
    **dict.fromkeys(("new", "create"), "init"),
    **dict.fromkeys(("test", "validate"), "check"),
    **dict.fromkeys(("search", "sweep"), "tune"),
    "infer": "predict",
    "tail": "logs",
    "price": "cost",
    "help": "--help",
    "version": "--version",
}
"""Subcommands or options of `sunspot`, keyed by their names in other programs."""

OTHER_CHECKPOINT_VERBS = {
    **dict.fromkeys(("list", "show"), "ls"),
    **dict.fromkeys(("download", "fetch"), "get"),
    **dict.fromkeys(("delete", "rm", "prune", "clean"), "gc"),
    "check": "verify",
}
"""Subcommands of `sunspot checkpoints`, keyed by their names in other programs."""

OTHER_SETTINGS = {
    "LR": "LEARNING_RATE",
    **dict.fromkeys(("BATCH", "BATCH_SIZE", "BS"), "GLOBAL_BATCH_SIZE"),
    **dict.fromkeys(("ACCUMULATE_GRAD_BATCHES", "GRADIENT_ACCUMULATION_STEPS", "GRAD_ACCUM"), "MICRO_BATCH_SIZE"),
    **dict.fromkeys(("ACCELERATOR", "CUDA", "DEVICE", "GPU"), "USE_GPU"),
    **dict.fromkeys(("DEVICES", "GPUS", "NPROC", "NUM_GPUS", "NUM_PROCESSES", "WORLD_SIZE"), "NUM_WORKERS"),
    "STEPS": "MAX_STEPS",
    **dict.fromkeys(("MODEL", "MODULE", "SCRIPT"), "TASK"),
    **dict.fromkeys(("ARGS", "CONFIG", "HPARAMS", "PARAMS"), "TASK_ARGS"),
    **dict.fromkeys(("NAME", "RUN"), "RUN_NAME"),
    **dict.fromkeys(("BUCKET", "OUTPUT", "OUTPUT_DIR", "RUNS", "SAVE_DIR", "STORAGE"), "STORAGE_PATH"),
    **dict.fromkeys(("DATA", "DATA_DIR", "DATA_PATH", "TRAIN_DATA"), "DATASET"),
    **dict.fromkeys(("EVAL_DATASET", "TEST_DATA", "VAL_DATA", "VAL_DATASET"), "TEST_DATASET"),
    **dict.fromkeys(("TEST_SIZE", "TEST_SPLIT", "VAL_SPLIT"), "TEST_SHARE"),
    **dict.fromkeys(("AMP", "BF16", "DTYPE", "FP16", "MIXED_PRECISION"), "PRECISION"),
    **dict.fromkeys(("DDP", "FSDP", "STRATEGY"), "PARALLEL"),
    **dict.fromkeys(("CLIP", "GRAD_CLIP", "GRADIENT_CLIP_VAL", "MAX_GRAD_NORM"), "CLIP_NORM"),
    "WD": "WEIGHT_DECAY",
    **dict.fromkeys(("LR_SCHEDULE", "LR_SCHEDULER", "SCHEDULER"), "SCHEDULE"),
    **dict.fromkeys(("EARLY_STOPPING", "PATIENCE"), "EARLY_STOP_EVALUATIONS"),
    "PRETRAINED": "INIT_FROM",
    **dict.fromkeys(("LOGGER", "MLFLOW", "REPORT_TO", "TENSORBOARD", "WANDB"), "TRACKING"),
}
"""Settings, keyed by their names in other programs."""

SUBMIT_OPTIONS = ("CLUSTER", "CONTEXT", "GENERATION", "IMAGE", "NAMESPACE", "PROFILE", "QUEUE")
"""Options of `sunspot submit` that users could mistake for settings."""


def find_meant(word: str, known: Iterable[str], other_names: Mapping[str, str] = NO_OTHER_NAMES) -> str:
    """Return the name that the user probably meant by an unknown `word`, or an empty string if no name is likely.

    `known` contains the valid names. `other_names` maps names in other programs to valid names, and is searched first.
    """
    import difflib  # not needed for `sunspot --help`

    if word in other_names:
        return other_names[word]
    names = list(known)
    nearest = difflib.get_close_matches(word, names, n=1, cutoff=LIKENESS)
    if nearest:
        return nearest[0]
    whole = [name for name in names if len(word) >= MIN_BEGINNING and name.startswith(word)]
    return min(whole, key=len, default="")
