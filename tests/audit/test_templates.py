"""Once calls were made with a template, its name means the same text for ever.

Whoever changes the words gives them a new name, keeps the old recipe in `app/audit/request_rebuilding.py`, and adds
the new one there and here.
"""

import hashlib
from itertools import chain

import msgspec
import orjson
from msgspec.structs import replace

from app.audit.request_rebuilding import TEMPLATES
from app.conductor import compact, prompt
from app.conductor.protocol import Brief, PastStep, Previous
from app.core.message.chat import Message, Task, Text, Tool, Toolbox
from app.core.plan.workflow import CONDUCTOR
from app.core.pool.catalog import CalibrationResult, Card, Limits, Price, Worker
from app.core.rating.features import excerpt, find_last_question
from app.core.run import visibility
from app.core.run.visibility import EarlierStep
from app.engine.runs.planning import EMBEDDING_TEMPLATE

CONVERSATION = (Message("system", (Text("Be brief."),)), Message("user", (Text("What is 2 + 2?"),)))
TASK = Task(CONVERSATION)
CALIBRATED = "51f46fdb15546a07ea3d2c95aa9aac100f083ee6cc307b7ec48cbbf2ec56d9dd"
"""Of `plan-1` with what was measured on the cards, which there was nothing of at first."""
MADE = {
    "features-1": "845af8e6b92990a5881181bbff2ac45ad28631824b9c565e61ae18dead9ed985",
    "compact-1": "74ce3c066e193a3194a4e0d0a1e84d828d04aadd5ed9caee33bace255b24ece2",
    "step-1": "4c8396b52481f039fde1c9f91d97689312c5069cb19c60f5340a9b6b09f09ce6",
    "json-1": "4c8396b52481f039fde1c9f91d97689312c5069cb19c60f5340a9b6b09f09ce6",
    "loosened-1": "4c8396b52481f039fde1c9f91d97689312c5069cb19c60f5340a9b6b09f09ce6",
    "further-1": "d0abeab3f8bc8da97d33ce90a9c0dcf6174f58b6d32f35f2b680f5e944e8d24c",
    "nested-1": "68cb404d6734d631b54ded7f577d1737b153c6fbb955c5d9fb08f72329c7884e",
    "nesting-1": "2e33d027086b6f60670745e33955aaa295161167f9a1b2a0e1462fc38a78a5a6",
    "nesting-further-1": "88d2e6a949c3c2c73191fd61cd2f1398ef384165d9b3f6e779ad3457a556e586",
    "further-2": "3051c12e41c53239070f1190113d4764b3322c8c7afed9910d0e190c72ca2e9f",
    "nesting-2": "56fcbc9662d6fa7239e40432ea4452b619d3f394cf2686e27660e9fb1c6f6333",
    "nesting-further-2": "70c1938515aecff0db1d697dc981bafac9223e31c13e91f1b5fc8a1f475bfcb3",
    "plan-2": "786ab12c30888850b3615ca53356250fdbe508181b48b7f5dcc80753f22ea3d3",
    "plan-1": "c2b745dc3c8e390e0faea30965045c4ca525a369299958d35e40d496b4762b50",
    "plan-1-reasons": "327a348418e748e7c6c6f7ca9147c4ff425f60d66d1c109215ed5afa9ca02032",
    "nesting-1-reasons": "3bf211900959b9d51d1557707c98a5059cd20d0f6d082db4438f84a90fe8db93",
    "further-1-reasons": "88444c62547073dbb7ee07fdbe95bb7fe7d8d2600bca0f121d3dba59eea2b83d",
    "nesting-further-1-reasons": "4105cab103c94f1799ad57389f040ce22bb14b5a026b1a02fa507338ed3996b0",
    "plan-2-reasons": "8900a456e4d75f5d10b4f6c5722e402aac0c60e30eedcb717cb08a9c06f3d31b",
    "nesting-2-reasons": "47720d261ca9f5cfccc52b76fba2816a3f1c636ef4445b38f13656ca5a265996",
    "further-2-reasons": "8d243534bb8671693b50b0075852f3e421d3181d04a677f632f48d82eaa741d8",
    "nesting-further-2-reasons": "ce3a1f324ffc6cb2201b76a78666075f454313b94deca4ce8ee04d240130607e",
    "plan-1-parts": "993a472ce449c2b2ddaabc99b36fbd057db97031edc5293080517b85fd8c04e4",
    "nesting-1-parts": "c7c5f718b08621e4f7b25916ff0f88da336b4ae9fc3e0055aa486e409beba8ce",
    "further-1-parts": "ab69222fb7c1e93da8b2064b6c62578186d4507bddd7c0b31aca34a95dde0009",
    "nesting-further-1-parts": "5456ba7921237de74e4358db58791ba0b959a093b8e829f617349927ac6beb86",
    "plan-1-reasons-parts": "a4c2cff8d6d7c80012131fe43657ade23d8e4ed50a38e0e74f5791da68da7648",
    "nesting-1-reasons-parts": "bdc8b401ffe0f6fb90e75dc2626cfcf45ca50830eadcc5d60bb38d7f82c27e88",
    "further-1-reasons-parts": "5e66c219c80c1afa61bb668d00147c8e59981c9626c274847081a9c2b6987b14",
    "nesting-further-1-reasons-parts": "be76367fcc37a771e6344905cc02486b7b77e5bcc1b97c1c0b93aeb9878006cf",
    "plan-2-parts": "57388debc25ea13f944a6f60958fca5ebbbe2dddce3922bc79dee26c7568e664",
    "nesting-2-parts": "29eb657616d72224d686f9242f97b15e92e8c5ee43a1dc8a41fb18142d1c7c20",
    "further-2-parts": "bc02e98ff71d08482e2bf758e29ee820399d6c9db5163ddd1d4ca3f12d6bf1c2",
    "nesting-further-2-parts": "c5082f93258a2eea5b4e3f08e3d36cfe6ab8119fc31984e86b81b1469be7c125",
    "plan-2-reasons-parts": "1b25a0ad82acc5c416b28a10de3e9f97721f557583c22a9e6168eb1fe0933765",
    "nesting-2-reasons-parts": "e5f69316dac93185ebc83cc13961ec6edcb308c18850b3e0597b2dba4f995cd2",
    "further-2-reasons-parts": "c4d96cc4b932f10026add335d5bb113a2da46ded4bfdf70f11dd65f2e2d8287d",
    "nesting-further-2-reasons-parts": "c0388ac3105d787abb5b16efc5e3971bee0f5ddf9298fee4b3612d5cc21773a2",
}


def digest(*conversations: tuple[Message, ...]) -> str:
    plain = []
    for messages in conversations:
        plain.append([msgspec.to_builtins(message) for message in messages])
    for message in chain.from_iterable(plain):
        del message["labels"]  # no provider is sent them
    return hashlib.sha256(orjson.dumps(plain)).hexdigest()


def steps() -> str:
    earlier_steps = [EarlierStep(0, "Think", "Two twos."), EarlierStep(2, "", "Four.")]
    composed = [
        visibility.compose(task, subtask, earlier)
        for task in (TASK, None)
        for subtask in ("", "Answer")
        for earlier in ((), earlier_steps)
    ]
    return digest(*composed)


def digest_of_nested_steps() -> str:
    """Steps of a workflow inside a step: what that one may see is their task."""
    earlier_steps = [EarlierStep(0, "Think", "Two twos."), EarlierStep(2, "", "Four.")]
    around = [
        visibility.compose(task, subtask, earlier, opens=True)
        for task in (TASK, None)
        for subtask in ("", "Take it apart")
        for earlier in ((), earlier_steps)
    ]
    return digest(
        *(visibility.compose(Task(view), "Answer", steps) for view in around for steps in ((), earlier_steps))
    )


def in_parts(brief: Brief) -> Brief:
    """The same brief with a document in the conversation, of which a conductor is shown parts."""
    lines = [f"# Part {n}\nThe {n}th part says little.\n" for n in range(400)]
    message = Message("user", (Text("".join(lines)),))
    return replace(brief, task=replace(brief.task, messages=(*brief.task.messages, message)), message_chars=2_000)


def plans(*, nests: bool = False, timed: bool = False, reasons: bool = False, parts: bool = False) -> str:
    workers = (Worker("a", "p", "m", Price(1, 2, 3), Card(("code",), speed=3.5)), Worker("b", "p", "m"))
    brief = Brief(TASK, workers, Limits(), 1_500_000)
    repair = Brief(TASK, workers, Limits(), 1_500_000, ("step 0: unknown field",), "{}")
    tools = Toolbox((Tool("look_up", "Looks something up."),))
    offered = Brief(Task(CONVERSATION, toolbox=tools), workers, Limits(), 0)
    left = 17.0 if timed else None
    briefs = [
        replace(brief_kind, nests=nests, seconds_left=left, reasons=reasons) for brief_kind in (brief, repair, offered)
    ]
    return digest(*map(prompt.messages, map(in_parts, briefs) if parts else briefs))


def digest_of_further_plans(
    *, nests: bool = False, timed: bool = False, reasons: bool = False, parts: bool = False
) -> str:
    last = PastStep(CONDUCTOR if nests else "c", "", ("user", "previous", 0), False)
    past = (PastStep("b", "Draft", ("user",), True), last)
    briefs = [
        Brief(TASK, (Worker("a", "p", "m"), Worker("b", "p", "m")), Limits(), 7, *mended, round=2, previous=before)
        for mended in ((), (("no plan",), "{"))
        for before in (Previous(past, "Four."), Previous(past[:1], ""), Previous(past, "12345678" * 3_000))
    ]
    left = 17.0 if timed else None
    asked_of = [replace(brief, nests=nests, seconds_left=left, reasons=reasons) for brief in briefs]
    return digest(*map(prompt.messages, map(in_parts, asked_of) if parts else asked_of))


def compact_plans() -> str:
    workers = (Worker("a", "p", "m", Price(1, 2, 3), Card(("code", "text"))), Worker("b", "p", "m"))
    return digest(*(compact.messages(Brief(task, workers, Limits(), 7)) for task in (TASK, Task(CONVERSATION[:1]))))


def digest_of_calibrated_plans() -> str:
    measured = (CalibrationResult("numbers", 17, 18), CalibrationResult("words", 0.5, 1))
    workers = (Worker("a", "p", "m", card=Card(("code",), measured=measured)), Worker("b", "p", "m"))
    return digest(prompt.messages(Brief(TASK, workers, Limits(), 7)))


def looks() -> str:
    """Return the digest of the texts that an embedder is shown."""
    long = Task((*CONVERSATION, Message("assistant", (Text("4"),)), Message("user", (Text("1234567890" * 900),))))
    texts = [excerpt(find_last_question(task.messages)) for task in (TASK, long, Task(CONVERSATION[:1]))]
    return digest(*((Message("user", (Text(text),)),) for text in texts))


def test_a_template_is_what_it_was() -> None:
    hashes = {visibility.TEMPLATE: steps(), prompt.TEMPLATE: plans(), prompt.FURTHER: digest_of_further_plans()}
    hashes |= {
        visibility.JSON_MODE: steps(),
        visibility.LOOSENED: steps(),
        visibility.NESTED: digest_of_nested_steps(),
        prompt.NESTING: plans(nests=True),
    }
    hashes |= {
        prompt.NESTING_FURTHER: digest_of_further_plans(nests=True),
        compact.TEMPLATE: compact_plans(),
        EMBEDDING_TEMPLATE: looks(),
    }
    hashes |= {"plan-2": plans(timed=True), "further-2": digest_of_further_plans(timed=True)}
    hashes |= {"nesting-2": plans(nests=True, timed=True)}
    hashes |= {"nesting-further-2": digest_of_further_plans(nests=True, timed=True)}
    for number, timed in ((1, False), (2, True)):
        for end, asks in (("-reasons", (True, False)), ("-parts", (False, True)), ("-reasons-parts", (True, True))):
            more = {"timed": timed, "reasons": asks[0], "parts": asks[1]}
            hashes[f"plan-{number}{end}"] = plans(**more)
            hashes[f"nesting-{number}{end}"] = plans(nests=True, **more)
            hashes[f"further-{number}{end}"] = digest_of_further_plans(**more)
            hashes[f"nesting-further-{number}{end}"] = digest_of_further_plans(nests=True, **more)
    assert hashes == MADE
    assert digest_of_calibrated_plans() == CALIBRATED


def test_every_template_can_be_composed_again() -> None:
    assert set(TEMPLATES) == set(MADE)
