"""What a model conductor is shown: its role, the workers by ordinal, the task, and the form of a plan.

Workers appear as ordinals in a shuffled order and never by name: names bring prejudice (arXiv 2512.04388). The fixed
part comes first and the task last, so that a server's prefix cache serves it. The caller's words stand between
`<question>` lines; they are what the plan is for, and the schema, not the prompt, is what keeps a plan valid.
"""

from app.conductor.protocol import Brief
from app.core.chat import Image, Message, Text, Toolbox
from app.core.pool import MILLION, Worker

TEMPLATE = "plan-1"
"""The name of what `messages` makes, kept with each call; a change of the words is another template."""
SUBTASK_CHARS = 600
"""What the schema lets a model write for one step; a caller's own plan may say more."""
TOKENS_PER_STEP = 24 + SUBTASK_CHARS
ALTERNATIVES = 10
"""Log-probabilities asked for beside each token's, where the server gives them with a schema."""
TOOL_CHARS = 300
"""Of a tool's description; the workers get all of it."""
ROLE = """You are the conductor of a team of expert models. You never answer the question yourself: you write a plan of
1 to {steps} steps. Each step names one worker, gives it a subtask in plain words, and lists what it may see.

Rules:
- "worker" is the number of a worker from the list.
- "subtask" says what that worker has to do: solve, plan, refine, check, combine. It sees nothing but its subtask and
  what "access" lists.
- "access" lists "user" (the question and the whole conversation) and the numbers of earlier steps, counted from 0.
- Steps that do not list each other run at the same time.
- The answer of the last step goes to the user as it is: its subtask must ask for the complete final answer in the form
  that the user wants.
- Use one step when one worker will do. Use more only where planning, a second opinion or a check is worth its price.

Answer with JSON only:
{{"steps": [{{"worker": 0, "subtask": "Work out a plan. Do not solve it yet.", "access": ["user"]}},
{{"worker": 1, "subtask": "Solve it by following the plan; give the final answer.", "access": ["user", 0]}}]}}"""

TOOLS = """The user offers tools that a worker may call while it works; the user carries the calls out and sends the
results, while the step waits:
{tools}

- Each step has one more field, "tools": true if it may call these tools. The last step may in any case.
- Give tools to another step only if its subtask cannot be done without them."""

REPAIR = """Your last plan could not be used:
{rejected}

The reasons:
{objections}

Write a corrected plan."""


def answer_tokens(steps: int) -> int:
    """The most that a plan of so many steps may take."""
    return 64 + steps * TOKENS_PER_STEP


def messages(brief: Brief) -> tuple[Message, ...]:
    """The conductor's conversation for this brief."""
    role = ROLE.format(steps=brief.limits.steps)
    cards = "\n".join(_card(ordinal, worker) for ordinal, worker in enumerate(brief.workers))
    budget = f"Budget left: ${brief.usd_left / MILLION:.4f}."
    offered = f"\n\n{TOOLS.format(tools=_tools(brief.task.toolbox))}" if brief.task.toolbox.tools else ""
    system = Message("system", (Text(f"{role}\n\nWorkers:\n{cards}{offered}"),))
    asked: tuple[Message, ...] = (system, Message("user", (Text(f"{_question(brief)}\n\n{budget}"),)))
    if brief.objections:
        reasons = "\n".join(f"- {reason}" for reason in brief.objections[:20])
        repair = REPAIR.format(rejected=brief.rejected[:4000] or "(nothing)", objections=reasons)
        asked += (Message("user", (Text(repair),)),)
    return asked


def _question(brief: Brief) -> str:
    turns = "\n\n".join(_turn(message) for message in brief.task.messages)
    return f"<question>\n{turns}\n</question>"


def _turn(message: Message) -> str:
    pictures = sum(isinstance(part, Image) for part in message.parts)
    note = f" [{pictures} image(s) attached]" if pictures else ""
    called = "".join(f" [calls {call.name}({call.arguments})]" for call in message.calls)
    return f"{message.role}: {message.text}{called}{note}"


def _tools(toolbox: Toolbox) -> str:
    return "\n".join(f"- {tool.name}: {tool.description[:TOOL_CHARS] or 'no description'}" for tool in toolbox.tools)


def _card(ordinal: int, worker: Worker) -> str:
    card = worker.card
    facts = [
        f"strengths: {', '.join(card.strengths) or 'general'}",
        f"price per million tokens: ${worker.price.input / MILLION:g} in, ${worker.price.output / MILLION:g} out",
        f"context: {card.context}",
        f"sees: {', '.join(sorted(card.modalities))}",
    ]
    if card.speed:
        facts.append(f"speed: {card.speed:g} tokens/s")
    return f"Worker {ordinal}: {'; '.join(facts)}"
