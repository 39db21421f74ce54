"""A world: processes, workers, callers and what befalls them, from one seed; and how it comes to rest.

0 s ............ processes start; callers come; faults happen
FAULTS_END ..... at the latest: no more faults; what is dead is replaced, what is frozen goes on, servers answer
at rest ........ every run has ended, no ticket is left; at the latest 60 s after the last deadline
the end ........ every process is told to stop, and must
"""

import asyncio
import hashlib
import math
import random
from collections.abc import Callable

from msgspec.structs import replace

from app.core.pool.catalog import Catalog
from app.engine.runs.admission import Order
from app.errors import BatonError
from app.stepqueue.protocol import Ticket
from tests.simulation.bell import Bell, Server
from tests.simulation.callers import SECONDS, CallerConnection, Visit, visit
from tests.simulation.database import Database, SimRunner, SimStore
from tests.simulation.faults import AS_SEEDED, FaultRates, Faults
from tests.simulation.loop import EPOCH, Machine, Stuck, VirtualLoop
from tests.simulation.operators import APPROVAL_WAIT, DecisionRequest, Verdict, pool_files, usual_pool
from tests.simulation.process import DRAINS, Process, Quiet, Setting, Watch
from tests.simulation.receiver import Receiver, Sender
from tests.simulation.report import Report
from tests.simulation.seam import Seam
from tests.simulation.stage import Log, alone
from tests.simulation.witness import Fact, Witness
from tests.simulation.workers import AdapterFault, SimProvider, Workers

FAULTS_END = 12.0
PATIENCE = 60.0
"""Seconds after the last deadline in which everything must have come to rest."""
STOPPING = 90.0
"""Seconds in which a healthy process must have stopped."""
TURNS = 15_000
NOTIFYING = 0.22
"""Share of the worlds in which there is a receiver of webhooks."""
FOR_THE_MOMENT = ("StoreUnavailable", "RunUndecided", "Overloaded")
LEFT = (
    ("leads", "SELECT id FROM runs WHERE driver = ? AND lease_until > ? AND ended_at IS NULL ORDER BY id"),
    ("holds a step of", "SELECT run FROM tickets WHERE holder = ? AND until > ? ORDER BY run"),
)
LAYOUTS = (
    ((True, True),),
    ((True, True), (True, True)),
    ((True, False), (False, True)),
    ((True, False), (False, True), (False, True)),
    ((True, False), (True, False), (False, True), (False, True)),
)
"""(gateway, dispatcher) for each process."""


class World:
    """One seed. `run` plays it and gives the report; the oracle's findings are added by `play`."""

    def __init__(
        self, seed: int, fault_rates: FaultRates = AS_SEEDED, *, keep_trace: bool = False, turns: int = TURNS
    ) -> None:
        self.seed = seed
        self.report = Report(seed)
        self.chance = random.Random(f"world {seed}")
        self.faults = Faults(
            fault_rates.of_seed(seed), random.Random(f"faults {seed}"), persons=random.Random(f"approvers {seed}")
        )
        self.calm = not self.faults.rates
        self.loop = VirtualLoop(f"loop {seed}", turns)
        self.witness = Witness(self.loop.time, self.note, self._asked_for_approval)
        self.database = Database()
        self.workers = Workers(self.witness, random.Random(f"workers {seed}"), self.loop.time)
        self.lease = self.chance.choice((2.0, 3.0, 5.0))
        self.queue = Server(self.loop, self.lease)
        notifies = self.chance.random() < NOTIFYING
        self.setting = Setting(self.loop, usual_pool(), self.lease, self.chance, Quiet(), notifies)
        self.receiver = Receiver(self.witness)
        self.visits: list[Visit] = []
        self.recalls: dict[str, CallerConnection] = {}
        """Who asked for each run once more in the end."""
        self.results: dict[str, str] = {}
        """What came of each tool call that a caller has heard of, by its id."""
        self.erasures: list[CallerConnection] = []
        """Who wanted the content of a run erased, and was refused or told that it is gone."""
        self.decisions: list[DecisionRequest] = []
        """What was said on plans that wait for an approval, and what came of it."""
        self.reloads: list[float] = []
        """When the pool file was read again."""
        self.processes: list[Process] = []
        self.harmed: set[str] = set()
        """Processes that were killed or frozen."""
        self.drained: set[str] = set()
        """Those that were told to stop in the midst of their work."""
        self.left: list[tuple[str, str, str]] = []
        """A process that has stopped in good order, and a run or a ticket's run that is still its own."""
        self.healed = 0.0
        self._replaced: set[str] = set()
        self._frozen: dict[str, tuple[float, bool]] = {}
        self._keep_trace = keep_trace
        self._hash = hashlib.sha256()
        self._log = Log()
        self._latest_deadline = 0.0
        self._coming = 0
        """Requests that callers are about to send: there is no rest before them."""
        self._stopping = False

    # -- telling

    def note(self, *what: object) -> None:
        """One line of the trace."""
        line = f"{self.loop.time():.6f} {' '.join(map(str, what))}"
        self._hash.update(line.encode())
        if self._keep_trace:
            self.report.lines.append(line)

    def run(self) -> Report:
        """Play the world to its end."""
        self.loop.set_exception_handler(lambda _loop, context: self._unhandled(context))
        with alone(self.seed, self._log):
            try:
                self.loop.run_until_complete(self._live())
            except Stuck as stuck:
                self.witness.object(f"stuck: {stuck}")
            for process in self.processes:
                process.seam.closed = True
            self.faults.on = False
            if left := self.loop.bury():
                self.witness.object(f"{left} tasks could not be cancelled")
        self.loop.close()
        return self._close()

    def _close(self) -> Report:
        report = self.report
        for error in self._log.errors:
            if not isinstance(error, BatonError | AdapterFault | asyncio.CancelledError):
                self.witness.object(f"an error was logged that is nobody's fault but ours: {error!r}")
        report.violations += [f"witness: {sentence}" for sentence in dict.fromkeys(self.witness.objections)]
        report.trace = self._hash.hexdigest()
        report.hits, report.places = self.faults.hits, self.faults.places
        report.seconds, report.turns = self.loop.time(), self.loop.turns
        report.calls = len(self.workers.received)
        return report

    def _unhandled(self, context: dict[str, object]) -> None:
        self.witness.object(f"unhandled: {context.get('message')}: {context.get('exception')!r}")

    # -- the story

    async def _live(self) -> None:
        layout = self.chance.choice(LAYOUTS)
        for number, roles in enumerate(layout):
            self.start(f"p{number}", *roles)
        async with asyncio.TaskGroup() as group:
            callers = group.create_task(self._callers())
            troubles = group.create_task(self._troubles())
            await self._until(lambda: callers.done() and not self._busy(), FAULTS_END)
            troubles.cancel()
        self._heal()
        await self._rest()
        await self._recall()
        await self._stop()

    def start(self, name: str, gateway: bool, dispatcher: bool, incarnation: int = 0) -> Process:
        """Return a new process; `name` is the place where it runs."""
        machine = self.loop.machine(f"{name}.{incarnation}")
        seam = Seam(machine.name, machine, self.faults, self, self.chance)
        runner = SimRunner(self.database, self.witness, seam)
        store = SimStore(runner, self.lease, self.loop.time, self.witness.giving)
        watch = Watch(self.loop)
        if self.faults.hit("process.clock_starts_wrong"):
            watch.wrong = self.chance.choice((-300.0, -5.0, 5.0, 300.0))
        provider = SimProvider(self.workers, seam, self.setting.catalog)
        slots = self.chance.choice((1, 2, 8))
        process = Process(
            self.setting,
            seam,
            watch,
            store,
            Bell(self.queue, seam),
            provider,
            Sender(self.receiver, seam),
            gateway,
            dispatcher,
            slots,
            self.chance.choice(DRAINS),
            self.loop.time(),
        )
        self.processes.append(process)
        self.note("start", machine.name)
        self.loop.spawn(machine, self._life(process))
        return process

    async def _life(self, process: Process) -> None:
        await process.run()
        now = EPOCH + self.loop.time()
        for what, query in LEFT:
            self.left += [(process.name, what, run) for (run,) in self.database.rows(query, process.name, now)]

    async def _callers(self) -> None:
        for number in range(self.chance.randint(1, 4)):
            await asyncio.sleep(1.5 * self.chance.random())
            guest = visit(number, usual_pool(), self.faults, self.chance, notifies=self.setting.notifies)
            guest.calls, guest.refused, guest.waits = self._called, self._refused, self._waits
            await self._until(lambda: any(process.serves for process in self.processes))
            process = self.chance.choice([process for process in self.processes if process.serves])
            self.visits.append(guest)
            self._expect(guest.order.limits.seconds)
            self.note("visit", number, process.name)
            process.take(guest, guest.order)
            if guest.repeats_after is not None:
                self._later(guest.repeats_after, self._repeat, guest)
            if guest.erases_after is not None:
                self._later(guest.erases_after, self._erase, guest)

    def _repeat(self, guest: Visit) -> None:
        """Send the same request again, to any process that serves."""
        if not self.healed:
            self._send(guest, guest.order)

    def _send(self, guest: Visit, order: Order, patience: int = 0) -> None:
        """A request, to whoever serves; once more a little later if nobody does."""
        self._expect(order.limits.seconds)
        serving = [process for process in self.processes if process.serves]
        if serving:
            self.chance.choice(serving).take(guest, order, patience)
        elif patience:
            self._send_later(1.0, guest, order, patience - 1)

    def _send_later(self, seconds: float, guest: Visit, order: Order, patience: int = 0) -> None:
        self._coming += 1
        self._later(seconds, self._come, guest, order, patience)

    def _come(self, guest: Visit, order: Order, patience: int) -> None:
        self._coming -= 1
        self._send(guest, order, patience)

    def _expect(self, seconds: float) -> None:
        self._latest_deadline = max(self._latest_deadline, self.loop.time() + seconds)

    def _called(self, guest: Visit, hearing: CallerConnection) -> None:
        """A caller was told to call its tools: it comes back with what they say, once or twice or never."""
        ended, order = hearing.ended[-1], hearing.order
        ids = tuple(call.id for call in ended.calls)
        self._expect(order.limits.tool_wait)
        if ids in guest.answered or hearing.left:
            return
        guest.answered.add(ids)
        if self.faults.hit("caller.abandons"):
            return
        self.results |= {id_: f"<tool:{guest.number}.{len(self.results) + n}> so." for n, id_ in enumerate(ids)}
        again, late = guest.goes_on(ended, self.results, order), 0.1 + 1.5 * self.chance.random()
        self._send_later(late, guest, again, 3)
        if self.faults.hit("caller.wavers"):
            self._later(late * self.chance.random(), self._call_off, guest, hearing)
        if self.faults.hit("caller.repeats"):
            self._send_later(late + self.chance.random(), guest, again)

    def _call_off(self, guest: Visit, hearing: CallerConnection) -> None:
        """Its caller changes its mind, and then forgets that it has."""
        serving = [process for process in self.processes if process.serves]
        if serving:
            self.chance.choice(serving).call_off(guest, hearing)

    def _refused(self, guest: Visit, hearing: CallerConnection) -> None:
        if hearing.patience and hearing.refused in FOR_THE_MOMENT:
            self._send_later(1.0, guest, hearing.order, hearing.patience - 1)

    def _waits(self, guest: Visit, hearing: CallerConnection) -> None:
        """A caller was told that its plan waits for an approval: with its key it comes back for the answer."""
        if hearing.order.once is not None and not hearing.left:
            self._send_later(0.5 + 3.0 * self.faults.persons.random(), guest, hearing.order, 3)

    def _asked_for_approval(self, fact: Fact) -> None:
        """A plan waits for an approval: somebody decides in time, late or never; perhaps others do as well."""
        self._expect(APPROVAL_WAIT + max(SECONDS))
        chance, hit, body = self.faults.persons, self.faults.hit, fact.body
        if hit("caller.withdraws"):
            self._later(APPROVAL_WAIT * chance.random(), self._withdraw, fact.run)
        if hit("approver.is_silent"):
            return
        seconds = APPROVAL_WAIT * (chance.uniform(0.9, 1.3) if hit("approver.is_late") else chance.uniform(0.05, 0.8))
        verdict: Verdict = "refuse" if hit("approver.refuses") else "approve"
        request = DecisionRequest(fact.run, fact.seq, verdict, body["digest"], by="ann")
        if verdict == "approve" and hit("approver.names_others"):
            request.replacements = tuple(name for name in sorted(body["workers"]) if chance.random() < 0.5)
        if verdict == "approve" and hit("approver.allows_little"):
            request.max_usd = body["usd"] + int((body["price"] or 0) * chance.random())
        self._decide_later(seconds, request)
        if hit("approver.repeats"):
            self._decide_later(seconds + chance.choice((0.0, chance.random())), replace(request))
        if hit("approver.wavers"):
            other: Verdict = "approve" if verdict == "refuse" else "refuse"
            self._decide_later(seconds + chance.uniform(-0.2, 0.2), replace(request, verdict=other, by="bea"))
        others = [known.digest for known in self.decisions if known.digest != body["digest"]]
        if others and hit("approver.mistakes_the_plan"):
            self._decide_later(seconds * chance.random(), replace(request, digest=chance.choice(others), by="cid"))

    def _withdraw(self, run: str) -> None:
        """The caller of a run that waits for an approval wants it to end."""
        serving = [process for process in self.processes if process.serves]
        if serving:
            process = self.faults.persons.choice(serving)
            guest = self.visits[0]
            process.call_off(guest, CallerConnection(process.name, guest.order, run=run))

    def _decide_later(self, seconds: float, request: DecisionRequest) -> None:
        self.decisions.append(request)
        self._later(max(seconds, 0.0), self._decide, request)

    def _decide(self, request: DecisionRequest) -> None:
        """A decision, at whoever serves; once more a little later if nobody does or nobody answers."""
        serving = [process for process in self.processes if process.serves]
        if serving:
            self.note("decide", request.run, request.verdict, request.by)
            self.faults.persons.choice(serving).decide(request, self._unanswered)
        else:
            self._unanswered(request)

    def _unanswered(self, request: DecisionRequest) -> None:
        if request.patience:
            request.patience -= 1
            self._later(1.0, self._decide, request)

    def _erase(self, guest: Visit) -> None:
        """Its caller wants the content gone, by way of whoever serves."""
        runs = sorted({hearing.run for hearing in guest.hearings if hearing.run})
        serving = [process for process in self.processes if process.serves]
        if runs and serving and not self.healed:
            self.note("erase", runs[0])
            process = self.chance.choice(serving)
            self.erasures.append(CallerConnection(process.name, guest.order, run=runs[0]))
            process.forget(self.erasures[-1])

    def _later(self, seconds: float, act: Callable[..., object], *arguments: object) -> None:
        self.loop.call_later(seconds, act, *arguments, context=self.loop.outside.context.copy())

    async def _rest(self) -> None:
        """Until nothing is left to do, or it took too long."""
        await self._until(lambda: not self._busy(), self._latest_deadline + PATIENCE)

    def _busy(self) -> bool:
        rows = self.database.rows
        if self._coming or rows("SELECT 1 FROM runs WHERE ended_at IS NULL OR held_usd + held_tokens > 0 LIMIT 1"):
            return True
        if rows("SELECT 1 FROM tickets LIMIT 1") or (self.setting.notifies and rows("SELECT 1 FROM notices LIMIT 1")):
            return True
        up = {process.name for process in self.living()}
        tasks = (*self.erasures, *(hearing for guest in self.visits for hearing in guest.hearings))
        return any(erasure.place in up and not erasure.over for erasure in tasks)

    async def _recall(self) -> None:
        """Every run is asked for once more, anywhere."""
        await self._until(lambda: any(process.serves for process in self.processes), self.loop.time() + PATIENCE)
        serving = [process for process in self.processes if process.serves]
        for (run,) in self.database.rows("SELECT id FROM runs WHERE ended_at IS NOT NULL ORDER BY id"):
            if serving:
                process = self.chance.choice(serving)
                self.recalls[run] = CallerConnection(process.name, self.visits[0].order)
                process.recall(run, self.recalls[run])
        await self._until(lambda: all(recall.over for recall in self.recalls.values()), self.loop.time() + PATIENCE)

    async def _stop(self) -> None:
        self._stopping = True
        for process in self.living():
            process.stopping.set()
        await self._until(lambda: all(process.ended for process in self.living()), self.loop.time() + STOPPING)

    async def _until(self, over: Callable[[], bool], latest: float = math.inf) -> None:
        """Look now and then, as somebody outside would."""
        while not over() and self.loop.time() < latest:  # noqa: ASYNC110
            await asyncio.sleep(0.5)

    def living(self) -> list[Process]:
        """Processes that nobody killed."""
        return [process for process in self.processes if not process.seam.machine.dead]

    # -- troubles

    async def _troubles(self) -> None:
        """Cause events from outside, about twice a second."""
        while True:
            await asyncio.sleep(0.25 + 0.5 * self.chance.random())
            now = self.loop.time()
            if self.faults.hit("store.outage"):
                self.database.down_until = now + self.chance.choice((0.5, 3.0, 8.0))
            if self.faults.hit("queue.outage"):
                self.queue.down_until = now + self.chance.choice((0.5, 3.0, 8.0))
            if self.faults.hit("queue.flushed"):
                self.queue.flush()
            if self.faults.hit("queue.forged_tickets"):
                self._forge()
            if self.faults.hit("queue.deaf"):
                for hearers in self.queue.hearers.values():
                    for hearer in hearers:
                        hearer.deaf_until = now + 2.0 * self.chance.random()
            if self.faults.hit("operator.reloads"):
                self._reload(self.faults.persons.choice((usual_pool(), *pool_files())))
            self._trouble_processes()

    def _trouble_processes(self) -> None:
        up = [process for process in self.living() if not process.seam.machine.held and not process.ended]
        if not up:
            return
        process = self.chance.choice(up)
        if self.faults.hit("process.killed"):
            self.crash(process.seam.machine)
        elif self.faults.hit("process.frozen"):
            self.freeze(process.seam.machine)
        elif self.faults.hit("process.drained"):
            self.drained.add(process.name)
            self.note("drain", process.name)
            process.stopping.set()
            self._replace(process)

    def _reload(self, catalog: Catalog) -> None:
        """The operator replaces the pool file, and has one process after the other read it."""
        self.setting.catalog = catalog
        self.reloads.append(self.loop.time())
        self.note("reload", catalog.digest)
        for process in self.living():
            self._later(self.faults.persons.random(), process.read_pool_file)

    def _forge(self) -> None:
        runs = [run for (run,) in self.database.rows("SELECT id FROM runs ORDER BY id")] or ["run_none"]
        for _ in range(self.chance.randint(1, 4)):
            run = self.chance.choice((*runs, "run_none"))
            step, seq = self.chance.randint(-1, 6), self.chance.choice((0, 1, 3, 9, 10**9))
            self.queue.add(Ticket(run, step, "nowhere", "nobody", seq, self.chance.choice((-1, 0, 1, 5))))

    def crash(self, machine: Machine) -> None:
        """It is gone, and another one comes in its place, sooner or later."""
        self.harmed.add(machine.name)
        self.loop.hold(machine)
        machine.dead = True
        self.note("crash", machine.name)
        for hearers in self.queue.hearers.values():
            hearers[:] = [hearer for hearer in hearers if hearer.seam.machine is not machine]
        self._replace(self._process(machine))

    def _process(self, machine: Machine) -> Process:
        return next(process for process in self.processes if process.seam.machine is machine)

    def freeze(self, machine: Machine) -> None:
        """It stands still, for a part of a lease or for several."""
        self.harmed.add(machine.name)
        self.loop.hold(machine)
        seconds = self.lease * self.chance.choice((0.3, 1.2, 2.0, 4.0))
        self.note("freeze", machine.name, seconds)
        still = self.faults.hit("process.clock_stands_still")
        self._frozen[machine.name] = self.loop.time(), still
        self._later(seconds, self._thaw, machine)

    def _thaw(self, machine: Machine) -> None:
        if machine.held and not machine.dead:
            self.note("thaw", machine.name)
            since, still = self._frozen.pop(machine.name)
            if still:  # a virtual machine that was suspended
                self._process(machine).watch.lag += self.loop.time() - since
            self.loop.let_go(machine)

    def _replace(self, process: Process) -> None:
        """Once, although it may be drained and killed."""
        if process.name in self._replaced:
            return
        self._replaced.add(process.name)
        place, _, incarnation = process.name.partition(".")
        roles = (process.gateway, process.dispatcher, int(incarnation) + 1)
        seconds = 0.1 + 3.0 * self.chance.random()
        self._later(seconds, self._restart, place, *roles)

    def _restart(self, place: str, gateway: bool, dispatcher: bool, incarnation: int) -> None:
        if not self._stopping:
            self.start(place, gateway, dispatcher, incarnation)

    def _heal(self) -> None:
        """No more faults: what is frozen goes on; what was killed is being replaced already."""
        self.faults.on = False
        self.healed = self.loop.time()
        self.note("heal")
        self.database.down_until = self.queue.down_until = 0.0
        if self.reloads and self.faults.persons.random() < 0.5:
            self._reload(usual_pool())
        for process in self.living():
            self._thaw(process.seam.machine)
        for hearers in self.queue.hearers.values():
            for hearer in hearers:
                hearer.deaf_until = 0.0
