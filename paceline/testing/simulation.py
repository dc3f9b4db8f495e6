"""A whole run of the production loops in simulated processes on a virtual clock, under planned faults.

Everything random follows from the seed: latencies, durations, faults; so a failing schedule is replayed by its seed.
`Simulation` starts, connects and kills processes as a runtime does (`runtime.supervision.PartsRuntime`); who
supervises it is handed in. All parts are made by `Parts`, so that a test can put a broken one in.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from paceline.core.config import Config, build_config
from paceline.core.errors import PacelineError, QueueClosed
from paceline.core.ports import VALIDATOR, TrainBackend
from paceline.core.weight_ports import WeightReceiver
from paceline.message_queue import MessageQueue
from paceline.rollout.replica import Replica
from paceline.rollout.rollouter import FullyAsyncRollouter
from paceline.sync.parameter_synchronizer import ParameterSynchronizer
from paceline.sync.weight_transaction import WeightTransaction
from paceline.testing.fault_injector import FaultInjector, Victim
from paceline.testing.fault_plan import Phase, PlannedFault, plan_faults
from paceline.testing.law_checker import LawChecker
from paceline.testing.marker_model import MarkerBackend, MarkerEngine
from paceline.testing.marker_task import EndlessPrompts, LengthReward, NumberDecoder
from paceline.testing.observed_parts import (
    ObservedBackend,
    ObservedEngine,
    ObservedQueue,
    ObservedReceiver,
    ObservedReplica,
    ObservedRollouter,
    ObservedSender,
    ObservedValidator,
)
from paceline.testing.recording import RecordingBoard, RecordingRolloutLog
from paceline.testing.simulated_process import SimulatedPart, SimulatedProcess, SimulatedWork
from paceline.testing.simulated_weights import WAYS, SimulatedWeights
from paceline.testing.virtual_clock import VirtualClock, run_virtual
from paceline.train.trainer import FullyAsyncTrainer
from paceline.train.validation_worker import ValidationWorker

DEADLINE_SECONDS = 2.0
HANG_SECONDS = 900.0
LIFE = 1
# Faults of these calls cannot be repeated without doing something twice: the run may end with their error.
ENDS_A_RUN: frozenset[Phase] = frozenset({"put", "get"})
OTHER_ROLES = ("trainer", "rollouter", "synchronizer", "message_queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The classes of a run's parts."""

    synchronizer: type[ParameterSynchronizer] = ParameterSynchronizer
    rollouter: type[FullyAsyncRollouter] = FullyAsyncRollouter
    replica: type[Replica] = Replica
    engine: type[MarkerEngine] = MarkerEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """What a schedule did. `error` is "" when the run completed."""

    seed: int
    planned: list[PlannedFault]
    landed: list[PlannedFault]
    violations: list[str]
    error: str
    syncs: int
    aborted_syncs: int
    virtual_seconds: float
    events: list[Any] = field(repr=False)

    @property
    def faults(self) -> str:
        """What a person reads about the faults of a schedule."""
        return f"seed {self.seed}: {', '.join(map(str, self.planned))}"


class Simulation:
    """One run; `run(supervise)` ends it within `HANG_SECONDS` of virtual time."""

    def __init__(
        self,
        seed: int,
        clock: VirtualClock,
        *,
        config: Config | None = None,
        faults: Sequence[PlannedFault] | None = None,
        parts: Parts | None = None,
    ) -> None:
        self.seed = seed
        self.clock = clock
        self.rng = random.Random(f"run-{seed}")
        self.config = config or seeded_config(self.rng)
        self.checker = LawChecker(clock.now)
        self.planned = plan_faults(seed, deadline_seconds=DEADLINE_SECONDS) if faults is None else list(faults)
        self.injector = FaultInjector(self.planned, random.Random(f"victims-{seed}"))
        self.injector.replicas = self._living_replicas
        self.rollout_log = RecordingRolloutLog()
        self._parts = parts or Parts()
        self._is_doomed = False
        self._latency_scale = self.rng.choice((0.0, 0.001, 0.01))
        self._step_seconds = self.rng.choice((0.005, 0.02))
        self._weights = SimulatedWeights(random.Random(f"weights-{seed}").choice(WAYS), self.config.arenas)
        self.backend = MarkerBackend(self._weights.width)
        self._handles: dict[str, SimulatedPart] = {}
        self._incarnations: dict[str, int] = {}
        self._all: list[SimulatedProcess] = []

    # -- what a supervisor calls -------------------------------------------------------------------------------------

    @property
    def spare_roles(self) -> list[str]:
        """Parts whose death the run survives."""
        return [VALIDATOR] if self.config.async_training.use_trainer_do_validate else []

    @property
    def replica_roles(self) -> list[str]:
        """Names of the replicas."""
        return [f"replica-{index}" for index in range(self.config.rollout.num_replicas)]

    async def start(self) -> None:
        """There is nothing to start."""

    def launch(self, role: str) -> SimulatedPart:
        """A new process."""
        number = self._incarnations[role] = self._incarnations.get(role, 0) + 1
        version_phase: dict[str, Phase] = {"rollouter": "rollout_version", "message_queue": "queue_version"}
        process = SimulatedProcess(
            role,
            injector=self.injector,
            latency=lambda: self.rng.random() * self._latency_scale,
            notice_seconds=self.rng.uniform(0.0, 2.5),
            version_phase=version_phase.get(role),
        )
        self._all.append(process)

        async def start() -> None:
            if role.startswith("replica-"):
                if number > 1:
                    await self.clock.sleep(self.rng.uniform(0.2, 4.0))
                self._build_replica(process, number)

        async def stop() -> None:
            process.kill()

        self._handles[role] = SimulatedPart(process, start=start, stop=stop)
        return self._handles[role]

    async def connect(self) -> None:
        """Build the other parts over the handles."""
        peers: dict[str, Any] = self._handles
        config, clock, checker = self.config, self.clock, self.checker
        queue = MessageQueue(
            capacity=config.max_required_samples,
            producers=["rollouter"],
            put_timeout_seconds=config.trainer.stall_timeout_seconds,
            clock=clock,
            events=checker,
        )
        rollouter = self._parts.rollouter(
            config,
            life=LIFE,
            prompts=EndlessPrompts(),
            replicas=[peers[role] for role in self.replica_roles],
            queue=peers["message_queue"],
            reward=LengthReward(),
            decoder=NumberDecoder(),
            stop_token_ids=(),
            clock=clock,
            events=checker,
            trainer_side=peers.get(VALIDATOR),
        )
        process = self._handles["trainer"].process
        trainer = FullyAsyncTrainer(
            config,
            life=LIFE,
            backend=cast("TrainBackend", ObservedBackend(self.backend, checker)),
            sender=ObservedSender(self._weights.sender, checker),
            queue=peers["message_queue"],
            source=peers["rollouter"],
            work=SimulatedWork(process, lambda: self.rng.uniform(0.0, 0.1)),
            publish_work=SimulatedWork(process, lambda: self.rng.uniform(0.0, 0.1)),
            rollout_log=self.rollout_log,
            clock=clock,
            events=checker,
        )
        synchronizer = self._parts.synchronizer(
            config,
            peers["trainer"],
            peers["rollouter"],
            peers["message_queue"],
            replicas=[peers[role] for role in self.replica_roles],
            clock=clock,
            events=checker,
        )
        self._serve("message_queue", ObservedQueue(queue, checker), _forever)
        self._serve("rollouter", ObservedRollouter(rollouter, checker, lambda: _until_closed(rollouter)), None)
        self._serve("trainer", trainer, lambda: trainer.fit(peers["synchronizer"]))
        self._serve("synchronizer", synchronizer, _forever)
        for role in self.spare_roles:
            self._build_validator(self._handles[role].process, peers["trainer"])

    def kill(self, role: str) -> None:
        """End a process at once. Without one that is no replica the run has to end, with an error."""
        self._is_doomed = self._is_doomed or role in OTHER_ROLES
        self._handles[role].process.kill()

    def stop(self, deadline_seconds: float) -> None:
        """End all processes."""
        for process in self._all:
            process.kill()

    # -- the run -----------------------------------------------------------------------------------------------------

    async def run(self, supervise: Callable[[Simulation], Awaitable[None]]) -> SimulationReport:
        """Run to the end, judge it."""
        error = ""
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # the dead leave futures behind
        visiting = asyncio.ensure_future(self._pause_once())
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await supervise(self)
        except PacelineError as raised:
            error = f"{type(raised).__name__}: {raised.message}"
        except TimeoutError:
            self.checker.violations.append(f"L2: the run hangs: {self.checker.ledger.in_flight or 'nothing in flight'}")
        finally:
            visiting.cancel()
            self.stop(0.0)
            await asyncio.sleep(0)
        self.checker.end(completed=not error)
        explained = self._is_doomed or any(fault.phase in ENDS_A_RUN for fault in self.injector.landed)
        if error and not explained:
            self.checker.violations.append(f"L2: the run ended with an error that no fault explains: {error}")
        return SimulationReport(
            seed=self.seed,
            planned=self.planned,
            landed=self.injector.landed,
            violations=self.checker.violations,
            error=error,
            syncs=self.checker.syncs,
            aborted_syncs=sum(type(event).__name__ == "SyncAborted" for event in self.checker.events),
            virtual_seconds=self.clock.now(),
            events=self.checker.events,
        )

    async def _pause_once(self) -> None:
        """A person pauses the fleet for a moment in the middle of the run, and insists on the resume."""
        await self.clock.sleep(self.rng.uniform(0.2, 1.5))
        rollouter = self._handles["rollouter"]
        if await _succeeds(rollouter.pause(self.clock.wall() + DEADLINE_SECONDS)):
            await self.clock.sleep(self.rng.uniform(0.0, 0.5))
        while not await _succeeds(rollouter.resume()):  # whether it is paused is not known
            await self.clock.sleep(0.1)

    def _build_replica(self, process: SimulatedProcess, number: int) -> None:
        role, name = process.role, f"{process.role}#{number}"
        receiver = self._weights.receiver(name)
        process.release = receiver.close
        step = self._step_seconds * self.rng.uniform(0.5, 2.0)
        replica = self._parts.replica(
            replica_id=role,
            make_engine=lambda: self._engine(process, name),
            transaction=self._transaction(process, receiver),
            partial_rollout=self.config.async_training.partial_rollout,
            drain_seconds=self.config.rollout.drain_timeout_seconds,
            decode_work=SimulatedWork(process, lambda: step),
            stage_work=SimulatedWork(process, lambda: self.rng.uniform(0.0, 0.05)),
            clock=self.clock,
            events=self.checker,
        )
        process.target = ObservedReplica(replica, checker=self.checker, name=name)

    def _build_validator(self, process: SimulatedProcess, trainer: Any) -> None:
        receivers: list[WeightReceiver] = []

        def new_transaction() -> WeightTransaction:
            receivers.append(self._weights.receiver(VALIDATOR))
            return self._transaction(process, receivers[-1])

        def release() -> None:
            for receiver in receivers:
                receiver.close()

        process.release = release
        worker = ValidationWorker(
            engine=self._engine(process, VALIDATOR),
            make_transaction=new_transaction,
            snapshots=trainer,
            work=SimulatedWork(process, lambda: self._step_seconds),
            clock=self.clock,
            events=self.checker,
        )
        self._serve(VALIDATOR, ObservedValidator(worker, self.checker), _forever)

    def _engine(self, process: SimulatedProcess, name: str) -> ObservedEngine:
        engine = self._parts.engine(width=self._weights.width, places=4, memory=self._weights.memory())
        return ObservedEngine(engine, process, injector=self.injector, checker=self.checker, name=name)

    def _transaction(self, process: SimulatedProcess, receiver: WeightReceiver) -> WeightTransaction:
        return WeightTransaction(
            replica_id=process.role,
            life=LIFE,
            receiver=ObservedReceiver(receiver, process, self.injector),
            board=RecordingBoard(),
            clock=self.clock,
        )

    def _serve(self, role: str, target: Any, run: Callable[[], Awaitable[None]] | None) -> None:
        if run is not None:
            target.run = run
        self._handles[role].process.target = target

    def _living_replicas(self) -> list[Victim]:
        parts = [self._handles[role].process for role in self.replica_roles]
        return [process for process in parts if process.alive]


def run_schedule(
    seed: int,
    supervise: Callable[[Simulation], Awaitable[None]],
    *,
    config: Config | None = None,
    faults: Sequence[PlannedFault] | None = None,
    parts: Parts | None = None,
) -> SimulationReport:
    """Run the schedule of this seed on a virtual clock and judge it."""

    async def main(clock: VirtualClock) -> SimulationReport:
        return await Simulation(seed, clock, config=config, faults=faults, parts=parts).run(supervise)

    return run_virtual(main)


def seeded_config(rng: random.Random) -> Config:
    """A small run of seven or more versions."""
    batch, trigger = rng.choice((2, 3)), rng.choice((1, 1, 2))
    return build_config(
        {
            "actor": {"ppo_mini_batch_size": batch},
            "async_training": {
                "staleness_threshold": rng.choice((0.0, 0.5, 1.0)),
                "trigger_parameter_sync_step": trigger,
                "partial_rollout": rng.random() < 0.7,
                "use_trainer_do_validate": batch == 2,
            },
            "rollout": {
                "n": 2,
                "num_replicas": rng.choice((2, 3)),
                "total_rollout_steps": batch * trigger * rng.choice((7, 8)),
                "max_num_seqs": 4,
                "exchange_timeout_seconds": DEADLINE_SECONDS,
                "max_replica_restarts": 20,
                "max_sample_losses": 10,
                "drain_timeout_seconds": rng.choice((0.02, 10.0)),
            },
            "checkpoint_engine": {
                "sync_timeout_seconds": DEADLINE_SECONDS,
                "update_order": rng.choice(("all", "rolling")),
            },
            "data": {"max_response_length": rng.randint(3, 8)},
            "trainer": {"test_freq": rng.choice((1, 2)), "stall_timeout_seconds": 60.0},
        }
    )


async def _succeeds(call: Coroutine[Any, Any, None]) -> bool:
    """Whether a call came back well within a person's patience; its cancellation is not ours."""
    task = asyncio.ensure_future(call)
    await asyncio.wait({task}, timeout=4 * DEADLINE_SECONDS)
    task.cancel()
    return task.done() and not task.cancelled() and task.exception() is None


async def _forever() -> None:
    await asyncio.Event().wait()


async def _until_closed(rollouter: FullyAsyncRollouter) -> None:
    try:
        await rollouter.fit()
    except QueueClosed:
        return  # the trainer has all it wanted and the queue was shut down
