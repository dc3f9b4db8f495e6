"""Weights pushed to a stock server that no run drives: from this host's memory, and as deltas through files."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.checkpoint_engine.filesystem import FilesystemSender
from paceline.core.errors import SyncError
from paceline.core.version import Version
from paceline.engine.vllm_commands import ReceiverSpec, Took, pack_command
from paceline.runtime.vllm_push import VllmPusher
from paceline.testing.publication import publish
from tests.vllm.fleet import LIFE, PATIENCE_SECONDS, Fleet


def test_deltas_reach_a_server_through_files(fleet: Fleet, tmp_path: Path) -> None:
    """As to a server on another host: nothing but the place of the files is shared."""
    sender = FilesystemSender(url=str(tmp_path / "weights"), clock=fleet.clock, delta="auto")
    spec = ReceiverSpec("filesystem", url=str(tmp_path / "weights"), deadline_seconds=PATIENCE_SECONDS)
    pusher = VllmPusher(
        [fleet.server.url], receiver=spec, start_seconds=PATIENCE_SECONDS, timeout_seconds=PATIENCE_SECONDS
    )

    async def scenario() -> None:
        await fleet.replicas[2].close()
        await fleet.loops[2]
        server = fleet.http_server(1.0)
        await server.start()
        sums: list[dict[str, str]] = []
        for _ in range(3):
            manifest = fleet.publish(fleet.changed_weights(0.05, "norm"))  # for the fleet's own engines
            for replica in fleet.replicas[:2]:
                await fleet.bring(replica, manifest)
            base = Version(LIFE, fleet.newest - 1).packed if sums else None
            pushed = publish(sender, fleet.tensors.items(), manifest.version, base)
            assert pushed.digest == manifest.digest
            assert (await pusher.push_async(pushed)).keys() == {fleet.server.url}
            assert await server.weight_version() == manifest.version
            sums.append(await server.checksums())
            assert sums[-1] == await fleet.ports[1].checksums()
            took = pack_command(Took(manifest.version, base or 0))
            if base is None:
                with pytest.raises(SyncError, match="not made from a delta"):
                    await server.init_weight_transfer(took)
            else:
                await server.init_weight_transfer(took)
        assert sums[0] != sums[1] != sums[2]
        await server.close()
        await fleet.meet_server_again()
        await fleet.sync(fleet.changed_weights(0.05))

    fleet.run(scenario())
    sender.close()
