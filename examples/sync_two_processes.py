import multiprocessing as mp
import tempfile

import msgspec
import torch

from paceline import SharedMemoryReceiver, SharedMemorySender, WeightManifest


def serve(name, pipe):
    receiver, module = SharedMemoryReceiver(holder=name), torch.nn.Linear(3, 1, bias=False)
    while packet := pipe.recv_bytes():
        staged = receiver.stage(msgspec.msgpack.decode(packet, type=WeightManifest))  # mapped and verified, or refused
        module.load_state_dict(dict(staged.tensors), assign=True)  # pointers; the lease on what they left ends
        pipe.send_bytes(f"{name} serves {staged.digest[:8]}: {module(torch.ones(3)).item():g}".encode())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        sender = SharedMemorySender(directory=directory)
        pipes = {f"replica-{index}": mp.Pipe() for index in range(2)}
        for name, (_, theirs) in pipes.items():
            mp.Process(target=serve, args=(name, theirs), daemon=True).start()
        for version in (1, 2, 3):
            sender.capture([("weight", torch.full((1, 3), float(version)))], version)  # a copy: training may go on
            manifest = sender.publish().manifest
            for ours, _ in pipes.values():
                ours.send_bytes(msgspec.msgpack.encode(manifest))
            print(manifest.digest[:8], *(ours.recv_bytes().decode() for ours, _ in pipes.values()), sep="\n  ")
        sender.close()
