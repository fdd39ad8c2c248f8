"""Tests of fine-tuning small pretrained models: trained weights, checkpoints and their readers, and rejected input."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sunspot.checkpoint.files import load_weights
from sunspot.data.source import EmptySource, read_rows
from sunspot.elastic.restore import TrainingState
from sunspot.errors import ConflictError, DataError, SettingsError
from sunspot.machine.private_folder import private_folder
from sunspot.predict.for_report import to_parts
from sunspot.run.attempts import Attempt
from sunspot.settings import Settings
from sunspot.storage import open_storage
from sunspot.tasks import finetune, load_task
from sunspot.tasks.pretrained import open_base
from sunspot.train.build import build_model
from tests.harness.datasets import refusal
from tests.harness.language_models import write_base, write_texts
from tests.harness.process_group import in_processes


@pytest.fixture(scope="module", autouse=True)
def peft() -> object:
    """Return peft. Only the tests that use peft import it, because the import takes seconds."""
    return pytest.importorskip("peft", reason="needs the extra hf")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def texts(tmp_path: Path) -> str:
    return write_texts(tmp_path / "texts")


def settings_of(base: str, texts: str = "sample", precision: str = "fp32", **arguments: Any) -> Settings:
    return Settings(
        task="sunspot.tasks.finetune",
        dataset=texts,
        precision=precision,
        learning_rate=0.01,
        task_args={"base": base, "context": 32, **arguments},
    )


def train(settings: Settings, steps: int = 30) -> tuple[Any, list[float]]:
    """Return the model after some steps on the same rows, and the loss of each step."""
    task: Any = load_task(settings)
    source, _ = task.find_sources(settings)
    torch.manual_seed(0)
    model = task.build_model(settings, source)
    optimizer = task.build_optimizer(model, settings)
    batch = {name: torch.from_numpy(values) for name, values in read_rows(source, 0, 8).items()}
    losses = []
    for _ in range(steps):
        each, metrics = task.loss(model, batch)
        assert each.shape == metrics["accuracy"].shape == (8,)
        losses.append(each.mean().item())
        each.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


@pytest.mark.parametrize(
    "arguments",
    [{}, {"rank": 4}, {"head": "classes"}, {"head": "classes", "rank": 2}],
    ids=["all weights", "lora", "classes", "classes with lora"],
)
def test_a_pretrained_model_learns(base: str, texts: str, arguments: dict[str, Any]) -> None:
    before = open_base(base).sha256
    model, losses = train(settings_of(base, texts, **arguments))
    assert losses[-1] < losses[0] - 0.1
    open_base.cache_clear()
    assert open_base(base).sha256 == before
    saved, weights = len(model.state_dict()), len(list(model.parameters()))
    assert saved < weights if arguments.get("rank") else saved == weights


@pytest.mark.parametrize("arguments", [{}, {"rank": 4}, {"head": "classes"}], ids=["text", "lora", "classes"])
def test_each_worker_reads_only_its_parts_of_the_base_model(
    base: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    settings = settings_of(base, **arguments)
    torch.manual_seed(settings.seed)
    expected = dict(finetune.build_model(settings, EmptySource((32,), 2)).named_parameters())

    def compare(_: object) -> bool:
        plan: Any = SimpleNamespace(
            settings=settings.model_copy(update={"parallel": "fsdp"}), source=EmptySource((32,), 2)
        )
        place: Any = SimpleNamespace(device=torch.device("cpu"), world_size=2, replicas=None)
        model = build_model(plan, load_task(plan.settings), TrainingState(), Attempt(1, "own", None, 0), place)
        found = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
        assert bool(model.positions) == (arguments.get("head") != "classes")
        return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)

    assert in_processes(tmp_path, 2, compare) == [True, True]


def test_a_model_on_the_meta_device_is_rejected_if_the_task_cannot_fill_it() -> None:
    plan: Any = SimpleNamespace(settings=Settings(), source=None)
    task = load_task(Settings())
    task.build_model = lambda *_: torch.nn.Linear(2, 2, device="meta")
    place: Any = SimpleNamespace(device=torch.device("cpu"), world_size=1, replicas=None)
    with pytest.raises(SettingsError, match=r"parameters on the meta device.*define load_pretrained"):
        build_model(plan, task, TrainingState(), Attempt(1, "own", None, 0), place)


def test_texts_packed_into_one_row_do_not_attend_to_each_other(base: str, texts: str) -> None:
    settings = settings_of(base, texts)
    model = finetune.build_model(settings, EmptySource((32,), 0)).eval()
    tokens = torch.randint(2, 300, (1, 6))
    position = torch.tensor([[0, 1, 2, 0, 1, 2]])
    together = model(tokens, position_ids=position)
    alone = model(tokens[:, 3:], position_ids=position[:, 3:])
    torch.testing.assert_close(together[:, 3:], alone)
    batch = {"tokens": tokens, "tokens_length": torch.tensor([5]), "position": position}
    [row], _ = finetune.loss(model, batch)
    shares = together.log_softmax(dim=2)
    counted = [-shares[0, place - 1, tokens[0, place]] for place in (1, 2, 4)]
    torch.testing.assert_close(row, torch.stack(counted).mean())


@pytest.mark.parametrize("package", ["peft", "tokenizers", "transformers"])
def test_a_missing_fine_tuning_package_is_reported_before_the_run_starts(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "sunspot.tasks.finetune")
    with refusal(SettingsError, f"No module named '{package}'", "EXTRAS=hf"):
        load_task(Settings(task="sunspot.tasks.finetune"))


def test_padding_does_not_change_the_class_of_a_text(base: str) -> None:
    settings = settings_of(base, head="classes")
    model: Any = finetune.build_model(settings, EmptySource((32,), 3)).eval()
    filled = {"tokens": torch.tensor([[5, 6, 7, 0, 0], [8, 9, 7, 6, 5]]), "tokens_length": torch.tensor([3, 5])}
    alone = torch.cat([model(torch.tensor([[5, 6, 7]])), model(filled["tokens"][1:])])
    torch.testing.assert_close(finetune.predict(model, filled), alone)


@pytest.mark.parametrize("head", ["text", "classes"])
def test_the_report_of_a_language_model_contains_texts_sorted_by_loss(base: str, texts: str, head: str) -> None:
    if head == "classes":
        texts = write_texts(Path(texts), label=["short", "long"] * 20)
    settings = settings_of(base, texts, head=head)
    source, _ = finetune.find_sources(settings)
    rows = {name: torch.from_numpy(values) for name, values in read_rows(source, 0, 12).items()}
    model, _ = train(settings, steps=1)
    parts = {part.title: part for part in to_parts(finetune.show(model.eval(), rows))}
    by_loss = parts["Texts by their loss"].rows
    assert len(by_loss) == 10
    losses, _ = finetune.loss(model, rows)
    assert by_loss[0][0] == pytest.approx(losses.min().item(), rel=1e-5)
    assert by_loss[-1][0] == pytest.approx(losses.max().item(), rel=1e-5)
    if head == "classes":
        assert {row[2] for row in by_loss} <= {"short", "long"}
    else:
        assert float(parts["Perplexity of 12 held-out texts"].text) == pytest.approx(
            losses.mean().exp().item(), rel=1e-2
        )
        assert len(parts["Continued texts"].rows) == 3


# ---------------------------------------------------------------------------------------------- what a checkpoint holds


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_peft_loads_an_adapter(base: str, texts: str, tmp_path: Path, precision: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    settings = settings_of(base, texts, precision, rank=4)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        model, _ = train(settings, steps=5)
    state = model.state_dict()
    assert sum(value.numel() for value in state.values()) < sum(p.numel() for p in model.parameters()) / 2
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    task: Any = load_task(settings)
    for name, content in task.checkpoint_files(model, state).items():
        (tmp_path / name).write_bytes(content)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=kind), str(tmp_path)).eval()
    tokens = torch.arange(2, 22)[None]
    torch.testing.assert_close(plain(tokens).logits, model.eval()(tokens))
    assert json.loads((tmp_path / "base.json").read_text()) == {"location": base, "sha256": open_base(base).sha256}


def test_transformers_loads_a_complete_model(base: str, texts: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = settings_of(base, texts)
    model, _ = train(settings, steps=5)
    task: Any = load_task(settings)
    for name, content in task.checkpoint_files(model, model.state_dict()).items():
        (tmp_path / name).write_bytes(content)
    save_file({name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.tensor([AutoTokenizer.from_pretrained(tmp_path)("The statement").input_ids])
    torch.testing.assert_close(plain(tokens).logits, model.eval()(tokens))
    [answer] = task.answer(model, ["The statement"], 5)
    assert answer
    assert task.answer(model, ["The statement"], 5) == [answer]


@pytest.mark.parametrize("head", ["text", "classes"])
def test_an_adapter_can_be_loaded_only_onto_its_base_model(base: str, texts: str, tmp_path: Path, head: str) -> None:
    settings = settings_of(base, texts, rank=4, head=head)
    model, _ = train(settings, steps=3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    task: Any = load_task(settings)
    source = EmptySource((32,), 2)
    torch.manual_seed(1)
    again = task.build_model(settings, source)
    load_weights(again, state, "checkpoint")
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
    assert task.answer(again.eval(), ["if x"], 4) == task.answer(model.eval(), ["if x"], 4)

    other = settings_of(write_base(tmp_path / "other", seed=1), texts, rank=4, head=head)
    with refusal(ConflictError, "other", "the adapter was trained on", "use the same base"):
        load_weights(task.build_model(other, source), state, "checkpoint")
    with refusal(ConflictError, "do not fit", "the state_dict and the model differ in the names of"):
        load_weights(
            task.build_model(settings_of(base, texts, rank=4, targets=["q_proj"]), source), state, "checkpoint"
        )


# ------------------------------------------------------------------------------------------------------ rejected input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rank": -1}, "rank=-1"),
        ({"rank": 2.5}, "rank=2.5"),
        ({"head": "image"}, "head='image'"),
        ({"targets": []}, "targets=[]"),
        ({"rannk": 4}, "rannk=4"),
        ({"rank": 4, "targets": ["nowhere"]}, "targets=['nowhere']"),
    ],
)
def test_invalid_arguments_of_the_fine_tuning_task_are_rejected(
    base: str, texts: str, arguments: dict[str, Any], said: str
) -> None:
    settings = settings_of(base, texts, **arguments)
    task: Any = load_task(settings)
    with refusal(SettingsError, "SUNSPOT_TASK_ARGS", said):
        task.build_model(settings, EmptySource((32,), 2))


@pytest.mark.parametrize("lacks", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_base_directory_without_a_model_is_rejected(base: str, tmp_path: Path, lacks: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    (folder / lacks).unlink()
    with refusal(SettingsError, "base=", "it contains no", lacks.removeprefix("model")):
        open_base(str(folder))


def test_damaged_weights_and_tokenizers_are_reported(base: str, texts: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    settings = settings_of(str(folder), texts)
    task: Any = load_task(settings)
    with refusal(SettingsError, str(folder), "transformers cannot load the model"):
        task.build_model(settings, EmptySource((32,), 2))
    state = load_file(f"{base}/model.safetensors")
    del state["model.norm.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    open_base.cache_clear()
    with refusal(SettingsError, str(folder), "the weights lack model.norm.weight"):
        task.build_model(settings, EmptySource((32,), 2))
    (folder / "tokenizer.json").write_text("{}")
    with refusal(DataError, "tokenizer.json is invalid"):
        task.find_sources(settings)


def test_a_base_model_that_does_not_exist_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refusal(SettingsError, "base='nobody/nothing'", "the hub did not provide it"):
        open_base("nobody/nothing")
    with refusal(SettingsError, "base=''", "the value must be a non-empty string"):
        open_base("")


def test_a_base_model_in_a_bucket_is_downloaded_only_once(base: str, texts: str, s3_bucket: str) -> None:
    """Check that adapters name the bucket, and not the path of the local copy."""
    url = f"s3://{s3_bucket}/models/tiny"
    storage = open_storage(url)
    for file in Path(base).iterdir():
        storage.write(file.name, file.read_bytes())
    fetched = open_base(url)
    assert fetched.folder.is_relative_to(private_folder())
    assert fetched.sha256 == open_base(base).sha256
    open_base.cache_clear()
    assert open_base(url).folder == fetched.folder
    model, _ = train(settings_of(url, texts, rank=2), steps=1)
    config = json.loads(finetune.checkpoint_files(model, model.state_dict())["adapter_config.json"])
    assert config["base_model_name_or_path"] == url
    shutil.rmtree(fetched.folder)
