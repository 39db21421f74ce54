"""What a model conductor is shown: its role, the workers by ordinal, the task, and the form of a plan.

Workers appear as ordinals in a shuffled order and never by name: names bring prejudice (arXiv 2512.04388). The fixed
part comes first and the task last, so that a server's prefix cache serves it. The caller's words stand between
`<question>` lines; they are what the plan is for, and the schema, not the prompt, is what keeps a plan valid.
"""

from app.conductor.protocol import Brief
from app.core.chat import Image, Message, Text
from app.core.pool import MILLION, Worker

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

REPAIR = """Your last plan could not be used:
{rejected}

The reasons:
{objections}

Write a corrected plan."""


def messages(brief: Brief) -> tuple[Message, ...]:
    """The conductor's conversation for this brief."""
    role = ROLE.format(steps=brief.limits.steps)
    cards = "\n".join(_card(ordinal, worker) for ordinal, worker in enumerate(brief.workers))
    budget = f"Budget left: ${brief.usd_left / MILLION:.4f}."
    system = Message("system", (Text(f"{role}\n\nWorkers:\n{cards}"),))
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
    return f"{message.role}: {message.text}{note}"


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
