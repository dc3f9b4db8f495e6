"""What runs inside a vLLM worker, over a model that is a dictionary: staged, hashed on its way in, proved, undone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from paceline.checkpoint_engine.filesystem import FilesystemSender
from paceline.checkpoint_engine.shared_memory import SharedMemorySender
from paceline.core.errors import ConfigError, CoverageError, DigestMismatch, PacelineError, SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.version import Version
from paceline.engine.vllm_commands import (
    PROTOCOL,
    Confirm,
    Discard,
    Hello,
    Load,
    ReceiverSpec,
    Stage,
    Staged,
    Took,
    Wrote,
)
from paceline.engine.vllm_worker import WorkerWeights
from paceline.runtime.system import SystemClock
from paceline.runtime.vllm_plugin import make_receiver
from paceline.testing.publication import publish
from tests.unit.engine.vllm_rig import LAYERS, SPEC, DictModel, Rig, until


def test_a_version_is_staged_loaded_and_confirmed() -> None:
    rig = Rig()
    rig.serve(rig.publish(0))
    assert {name: tensor.tolist() for name, tensor in rig.model.weights.items()} == {
        name: tensor.tolist() for name, tensor in rig.tensors.items()
    }


def test_whoever_waits_for_a_version_is_told_by_a_file(tmp_path: Path) -> None:
    rig = Rig()
    manifest = rig.publish(0)
    rig.stage(manifest, hints=str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == [str(manifest.version)]
    other = msgspec.structs.replace(rig.publish(1), arena_id="gone")
    rig.worker.obey(Stage(other, SPEC, hints=str(tmp_path)))
    with pytest.raises(SyncError):
        until(lambda: rig.worker.obey(Staged(other.version)))
    assert (tmp_path / str(other.version)).exists(), "also when it failed: the error is waiting"
    rig.stage(rig.publish(2), hints=str(tmp_path / "nowhere"))


def test_only_layers_that_changed_are_loaded_whole() -> None:
    rig = Rig()
    rig.serve(rig.publish(0))
    rig.serve(rig.publish(1, k=50.0))
    rig.serve(rig.publish(2, norm=60.0, embed=61.0))
    rig.serve(rig.publish(3))
    assert rig.model.loads == [set(LAYERS), {"q", "k", "v"}, {"norm", "embed"}]
    assert rig.model.weights["k"].tolist() == [50.0] * 4
    rig.serve(rig.publish(4, q=70.0), "full")
    assert rig.model.loads[-1] == set(LAYERS)


def test_where_the_model_allows_it_only_elements_that_changed_are_written() -> None:
    rig = Rig()
    rig.model.writes_in_place = True
    rig.serve(rig.publish(0))
    rig.tensors["q"] = torch.tensor([0.0, 0.0, 8.0, 0.0])
    rig.serve(publish(rig.sender, rig.tensors.items(), Version(1, 1).packed))
    assert (rig.model.written, len(rig.model.loads)) == ([1], 1)
    rig.worker.obey(Wrote(Version(1, 1).packed))
    assert rig.model.weights["q"].tolist() == [0.0, 0.0, 8.0, 0.0]
    rig.serve(rig.publish(2, q=1.0, k=2.5, v=3.5, norm=4.5, embed=5.5))
    assert (len(rig.model.written), rig.model.loads[-1]) == (1, set(LAYERS)), "most has changed"
    for n in (1, 2):
        with pytest.raises(SyncError, match="was not written in place"):
            rig.worker.obey(Wrote(Version(1, n).packed))


def test_on_one_host_versions_are_mapped_and_what_differs_is_loaded(tmp_path: Path) -> None:
    sender = SharedMemorySender(directory=str(tmp_path), delta="delta")
    model = DictModel()
    worker = WorkerWeights(loader=model, make_receiver=make_receiver)
    tensors = {name: torch.randn(1000) for name in LAYERS}
    first, second = Version(1, 0).packed, Version(1, 1).packed

    def serve(version: int, base: int | None) -> WeightManifest:
        manifest = publish(sender, tensors.items(), version, base)
        worker.obey(Stage(manifest, SPEC))
        until(lambda: worker.obey(Staged(version)))
        worker.obey(Load(version, "changed"))
        worker.obey(Confirm(version, manifest.digest))
        return manifest

    serve(first, None)
    tensors["norm"] = tensors["norm"] + 1.0
    assert serve(second, first).delta is not None, "one was made; mapping all costs less than decoding it"
    with pytest.raises(SyncError, match="not made from a delta"):
        worker.obey(Took(second, first))
    assert model.loads == [set(LAYERS), {"norm"}]
    worker.close()
    sender.close()


def test_what_was_taken_is_told(tmp_path: Path) -> None:
    spec = ReceiverSpec("filesystem", url=str(tmp_path))
    sender = FilesystemSender(url=spec.url, clock=SystemClock(), delta="delta")
    model = DictModel()
    worker = WorkerWeights(loader=model, make_receiver=make_receiver)
    tensors = {name: torch.randn(1000) for name in LAYERS}
    for n in range(3):
        tensors["q"] = tensors["q"].clone()
        tensors["q"][n] += 1.0
        version, base = Version(1, n).packed, Version(1, n - 1).packed if n else None
        manifest = publish(sender, tensors.items(), version, base)
        worker.obey(Stage(manifest, spec))
        until(lambda v=version: worker.obey(Staged(v)))  # type: ignore[misc]
        if base is None:
            with pytest.raises(SyncError, match="not made from a delta"):
                worker.obey(Took(version, 5))
        else:
            worker.obey(Took(version, base))
        worker.obey(Load(version, "changed"))
        worker.obey(Confirm(version, manifest.digest))
    assert torch.equal(model.weights["q"], tensors["q"])
    worker.close()
    sender.close()


def test_changes_are_written_only_on_the_version_that_they_were_found_against() -> None:
    rig = Rig()
    rig.model.writes_in_place = True
    first = rig.publish(0)
    rig.serve(first)
    rig.tensors["q"] = torch.tensor([0.0, 0.0, 8.0, 0.0])
    second = publish(rig.sender, rig.tensors.items(), Version(1, 1).packed)
    rig.stage(second)
    rig.worker.obey(Load(first.version, "full"))
    rig.worker.obey(Confirm(first.version, first.digest))
    rig.model.fail_after = 0
    with pytest.raises(CoverageError):
        rig.worker.obey(Load(first.version, "full"))
    rig.model.fail_after = None
    rig.worker.obey(Load(second.version, "changed"))
    rig.worker.obey(Confirm(second.version, second.digest))
    assert rig.model.written == [], "after a failure nothing is known of the model"


def test_nothing_is_confirmed_that_did_not_enter_the_model() -> None:
    rig = Rig()
    first, second = rig.publish(0), rig.publish(1, q=9.0)
    with pytest.raises(DigestMismatch, match="is nothing"):
        rig.worker.obey(Confirm(first.version, first.digest))
    rig.stage(first)
    rig.stage(second)
    rig.worker.obey(Load(first.version))
    with pytest.raises(DigestMismatch, match=r"is 1\.0 .*, not 1\.1"):
        rig.worker.obey(Confirm(second.version, second.digest))
    with pytest.raises(DigestMismatch):
        rig.worker.obey(Confirm(first.version, "0" * 32))
    rig.worker.obey(Confirm(first.version, first.digest))


def test_a_load_that_fails_is_undone_by_loading_the_version_before_whole() -> None:
    rig = Rig()
    first = rig.publish(0)
    rig.serve(first)
    second = rig.publish(1, q=9.0, k=9.0, v=9.0)
    rig.stage(second)
    rig.model.fail_after = 2
    with pytest.raises(CoverageError, match="refuses the rest"):
        rig.worker.obey(Load(second.version, "changed"))
    with pytest.raises(DigestMismatch, match="is nothing"):
        rig.worker.obey(Confirm(second.version, second.digest))
    rig.model.fail_after = None
    rig.worker.obey(Load(first.version, "changed"))
    rig.worker.obey(Confirm(first.version, first.digest))
    assert rig.model.loads[-1] == set(LAYERS), "after a failure nothing is known, so all is loaded"
    assert rig.model.weights["q"].tolist() == [0.0] * 4


def test_confirmed_versions_end_the_lease_of_those_before() -> None:
    rig = Rig()
    manifests = [rig.publish(n) for n in range(2)]
    for manifest in manifests:
        rig.serve(manifest)
    with pytest.raises(SyncError, match=r"1\.0 is not held"):
        rig.worker.obey(Load(manifests[0].version))
    rig.worker.obey(Load(manifests[1].version))


def test_bytes_that_are_not_what_was_published_do_not_become_a_version() -> None:
    rig = Rig()
    rig.serve(rig.publish(0))
    manifest = rig.publish(1, embed=3.5)
    torn = msgspec.structs.replace(
        manifest,
        tensors=tuple(
            msgspec.structs.replace(meta, digest="f" * 32) if meta.name == "embed" else meta
            for meta in manifest.tensors
        ),
    )

    def stage_and_load() -> None:
        rig.stage(torn)
        rig.worker.obey(Load(torn.version))

    with pytest.raises(PacelineError):
        stage_and_load()
    with pytest.raises(DigestMismatch):
        rig.worker.obey(Confirm(manifest.version, manifest.digest))


@pytest.mark.parametrize("what", ["tensor", "root"])
def test_what_enters_the_model_is_hashed_there(what: str) -> None:
    rig = Rig(verify="off")
    manifest = rig.publish(0)
    wrong = tuple(msgspec.structs.replace(meta, digest="f" * 32) for meta in manifest.tensors)
    lying = (
        msgspec.structs.replace(manifest, digest="f" * 32)
        if what == "root"
        else msgspec.structs.replace(manifest, tensors=wrong)
    )
    rig.stage(lying)
    with pytest.raises(DigestMismatch, match="entered the model"):
        rig.worker.obey(Load(lying.version))
    with pytest.raises(DigestMismatch, match="is nothing"):
        rig.worker.obey(Confirm(lying.version, lying.digest))


def test_names_are_rewritten_and_the_trainer_keeps_its_own() -> None:
    rig = Rig()
    rig.tensors = {f"module.{name}": tensor for name, tensor in rig.tensors.items()} | {"module.value": torch.ones(2)}
    manifest = rig.publish(0)
    rig.stage(manifest, name_rules=(("module.", ""),), trainer_only=("module.value",))
    rig.worker.obey(Load(manifest.version))
    rig.worker.obey(Confirm(manifest.version, manifest.digest))
    assert rig.model.weights.keys() == LAYERS.keys()


@pytest.mark.parametrize(("quantization", "works"), [("steady", True), ("drifting", False)])
def test_a_quantised_model_has_to_load_twice_alike(quantization: str, works: bool) -> None:
    rig = Rig()
    rig.model.quantization = quantization
    manifest = rig.publish(0)
    rig.stage(manifest)
    if works:
        rig.worker.obey(Load(manifest.version))
        return
    with pytest.raises(ConfigError, match="serve it without quantization"):
        rig.worker.obey(Load(manifest.version))


def test_a_discarded_version_is_gone() -> None:
    rig = Rig()
    manifest = rig.publish(0)
    rig.stage(manifest)
    rig.worker.obey(Discard(manifest.version))
    rig.worker.obey(Discard(manifest.version))
    with pytest.raises(SyncError, match="not held"):
        rig.worker.obey(Load(manifest.version))


def test_a_receiver_is_opened_once_and_all_is_released_at_the_end() -> None:
    rig = Rig()
    rig.serve(rig.publish(0))
    rig.serve(rig.publish(1, q=4.0))
    assert rig.receivers == [SPEC]
    rig.worker.close()
    assert rig.sender.blocking_holders() == []


@pytest.mark.parametrize(
    ("hello", "complaint"),
    [
        (Hello(protocol=PROTOCOL + 1), "install the same version on both sides"),
        (Hello(model_type="other"), "has model_type toy, but this run needs other"),
        (Hello(logprobs_mode="processed"), "has logprobs_mode raw, but this run needs processed"),
        (Hello(dtype="bfloat16"), "has dtype float32, but this run needs bfloat16"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(hello: Hello, complaint: str) -> None:
    rig = Rig()
    rig.worker.obey(Hello(model_type="toy", dtype="float32"))
    with pytest.raises(ConfigError, match=complaint):
        rig.worker.obey(hello)
