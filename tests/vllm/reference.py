"""The trainer's own likeliest plans, for whoever has served the same weights: run with an interpreter that has torch.

Standard input: `{"model": FOLDER, "split": ..., "seed": ..., "orders": [[...], ...]}`, an order in which the pool was
shown for each of the split's first tasks. Standard output: the plans' texts, in the same order.
"""

import json
import sys
from pathlib import Path

import torch
from msgspec.structs import replace

from app.lab import prompt
from app.lab.evaluate import draw_exam
from app.lab.export import load_conductor
from app.lab.plans import to_text, to_tokens
from app.lab.train_loop import greedy


def main() -> None:
    """Read, plan, write."""
    torch.set_num_threads(1)
    request = json.load(sys.stdin)
    orders = [tuple(order) for order in request["orders"]]
    lessons = draw_exam(request["split"], len(orders), request["seed"])
    lessons_in_order = [replace(lesson, order=order) for lesson, order in zip(lessons, orders, strict=True)]
    plans = greedy(load_conductor(Path(request["model"])), lessons_in_order)
    texts = []
    for lesson, plan in zip(lessons_in_order, plans, strict=True):
        texts.append(to_text(to_tokens(prompt.over_ordinals(plan, lesson.order))))
    json.dump(texts, sys.stdout)


if __name__ == "__main__":
    main()
