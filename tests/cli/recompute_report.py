# fmt: off
"""Recomputes the figures of `baton report --json` from EXPORT RATINGS OPTIONS, with nothing of Baton's code."""
import base64, datetime, json, pathlib, sys, zoneinfo  # noqa: E401, I001
from collections import Counter
pools, runs, zone = {}, [], zoneinfo.ZoneInfo((options := json.loads(sys.argv[3]))["zone"])
export, ratings = ([json.loads(line) for line in pathlib.Path(path).read_text().splitlines()] for path in sys.argv[1:3])
for line in export:
    if "catalog" in line:
        pools[line["catalog"]] = json.loads(base64.b64decode(line["body"]))["workers"]
    elif "run" in line:
        runs.append(line["run"] | {"lines": []})
    elif runs:
        runs[-1]["lines"].append(line)
def of(run, kind):
    return [line["body"] for line in run["lines"] if line.get("kind") == kind]
def verdict(run):
    mine = sorted([one for one in ratings if one["run"] == run["id"]], key=lambda one: (one["at"], one["id"]))
    if options["success"] == "signals":
        by = of(run, "run.cancel_asked")[0]["by"] if run["state"] == "cancelled" else ""
        stopped = {"abandoned"} if by == "client" else {"cancelled"} if by == "caller" else set()
        run["sources"] = {one["source"] for one in mine if one["kind"] == "implicit"} | stopped
        return not run["sources"] if run["sources"] or run["state"] == "succeeded" else None
    kind = {"feedback": "explicit", "graders": "grader"}[options["success"]]
    run["sources"] = scores = {x["source"]: x["score"] for x in mine if x["kind"] == kind and x["score"] is not None}
    return sum(scores.values()) / len(scores) >= options["threshold"] if scores else None
def sums(some):
    judged = [run for run in some if run["verdict"] is not None]
    won, spent = sum(run["verdict"] for run in judged), sum(run["usd"] for run in judged)
    return {"runs": len(some), "judged": len(judged), "without_verdict": len(some) - len(judged), "successes": won,
            "unanswered": sum(run["state"] != "succeeded" for run in some), "judged_cost_usd": spent / 1e6, "cost_usd":
            sum(run["usd"] for run in some) / 1e6, "cost_per_success_usd": round(spent / won / 1e6, 9) if won else None}
again, runs = ([run for run in runs if ("origin_kind" in of(run, "run.admitted")[0]) == one] for one in (True, False))
previews, going_on = ([run for run in runs if of(run, "run.admitted")[0]["preview"] == planned and
                      (planned or run["ended_at"] is None)] for planned in (True, False))
runs = [run for run in sorted(runs, key=lambda run: (run["created_at"], run["id"])) if run not in previews + going_on]
spared, best, clusters, paid, least, fair = Counter(calls_not_measured=0), Counter(), {}, 0, 0, ("ok", "cancelled")
for run in runs:
    start, ends = of(run, "run.admitted")[0], {end["call"]: end for end in of(run, "call.finished")}
    steps, opened = {one["n"]: one for one in of(run, "plan.step")}, {p["proposal"]: p for p in of(run, "plan.opened")}
    work = [one for one in of(run, "call.intended") if one["n"] is not None]
    over = [(one, ends[one["call"]]) for one in work if one["call"] in ends]
    run["usd"], run["verdict"] = sum(end["usd"] for end in ends.values()), verdict(run)
    task = next(line["body"] for line in run["lines"] if line.get("content") == start["task"])
    task, workers = json.loads(base64.b64decode(task)), {one["worker"] for one in work}
    run["by"] = {name: {run[name]} - {None} for name in ("tier", "tenant", "key", "topology")} | {"worker": workers}
    run["by"] |= {f"metadata.{name}": [value] for name, value in task["metadata"].items()} | {
        "week": [datetime.datetime.fromtimestamp(run["created_at"], zone).strftime("%G-W%V")],
        "user": {task["user"], task.get("echoed", {}).get("safety_identifier")} - {None}}
    counts = {"rounds": {opened[one["proposal"]].get("round", 1) for one in of(run, "plan.accepted") if one["steps"]},
              "failed calls": [e for _, e in over if e["outcome"] not in fair], "steps": {one["n"] for one in work}}
    run["has"] = [(name, "5 or more" if len(those) >= 5 else str(len(those))) for name, those in counts.items()] + [
        *(("worker", one) for one in workers), ("fallback", "yes" if run["degraded"] else "no"), ("tier", run["tier"]),
        ("tools", "called" if of(run, "step.awaiting_tool") else "not called"), ("topology", run["topology"] or "none")]
    fine = [(one, end["usage"]) for one, end in over if end["outcome"] == "ok"]
    tokens = next((usage["input"] for one, usage in fine if one["access"] == ["user"]), None)
    for one, usage in fine:
        spared.update(calls=1, input_tokens=usage["input"])
        for other in (end for end in of(run, "step.done") if end["n"] < one["n"] and end["n"] not in one["access"]):
            if steps[other["n"]]["proposal"] == steps[one["n"]]["proposal"] and (giver := ends.get(other["call"])):
                spared["spared_output_tokens"] += giver["usage"]["output"] - giver["usage"]["reasoning"]
        if "user" not in one["access"] and steps[one["n"]].get("parent") is None:
            spared.update({"calls_not_measured": 1} if tokens is None else {"spared_conversation_tokens": tokens})
    bills = Counter({name: 0 for name in start["pool"] if over and pools[start["catalog"]][name]["priced"]})
    for name, use in ((name, end["usage"]) for name in bills for _, end in over):
        price, fresh = pools[start["catalog"]][name]["price"], {"input": use["input"] - use["cached"]}
        bills[name] -= sum((use | fresh)[part] * price[part] for part in ("input", "cached", "output")) // -(10**6)
    best.update(sorted(bills, key=bills.get)[:1] or [None] * bool(over))
    paid, least = paid + sum(end["usd"] for _, end in over if bills), least + min(bills.values(), default=0)
    for kind, at, body in ((line["kind"], line["at"], line["body"]) for line in run["lines"] if "event" in line):
        n, error, fault = body.get("n"), body.get("error"), body.get("outage", 0) + ("driver was lost" in str(body))
        where = "plan" if n is None else str(n - opened[steps[n]["proposal"]]["base"])
        who = [one["worker"] for one in work if one["n"] == n] or [steps[n]["worker"] if n in steps else ""]
        workers_called = [one["worker"] for one in of(run, "call.intended") if one["call"] == body.get("call")]
        ended = ("run", error or run["state"], run["state"], "", "")
        ends = {"call.finished": ("call", error or body.get("outcome"), body.get("reason", ""), where, *workers_called),
                "plan.rejected": ("plan", ("plan_rejected", "conductor_failed", "engine_lost")[fault], "", where, ""),
                "step.failed": ("step", error, "", where, who[-1]), "run.failed": ended, "run.cancelled": ended,
                "run.expired": ended, "run.over_budget": ended}
        if (shape := ends.get(kind)) and body.get("outcome") not in fair:
            clusters.setdefault((*shape[:3], run["topology"] or "none", *shape[3:]), []).append((at, run["id"]))
groups = {(name, value): [run for run in runs if value in (run["by"].get(name) or [None])] for name in options["by"]
          for value in {one for run in runs for one in run["by"].get(name) or [None]}}
top = sorted(runs, key=lambda run: -run["usd"])[:-(-len(runs) // 5)]
usual, there = (Counter(one for run in some for one in run["has"]) for some in (runs, top))
lifts = [(there[one] * len(runs) / len(top) / usual[one], one) for one in there]
spared["spared_tokens"] = hidden = spared["spared_output_tokens"] + spared["spared_conversation_tokens"]
print(json.dumps({
    "left_out": {"open": len(going_on), "previews": len(previews), "shadows": 0, "replays": len(again), "damaged": 0},
    "total": sums(runs), "sources": Counter(name for run in runs for name in run["sources"]),
    "groups": [{"by": by, "group": value} | sums(some) for (by, value), some in groups.items()],
    "dearest": {"runs": len(top), "cost_usd": sums(top)["cost_usd"],
                "share_of_cost": round(sum(run["usd"] for run in top) / sum(run["usd"] for run in runs), 6),
                "from_cost_usd": top[-1]["usd"] / 1e6, "share_of_runs": 0.2, "features": [
                    {"feature": one[0], "value": one[1], "runs": there[one], "of_runs": usual[one],
                     "lift": round(lift, 6)} for lift, one in lifts if there[one] * len(runs) > len(top) * usual[one]]},
    "access_lists": spared | {"share_spared": round(hidden / (hidden + spared["input_tokens"]), 6)},
    "cheapest": {"runs_without_prices": best.pop(None, 0), "runs": best.total(), "cheapest_workers": best, "cost_usd":
       paid / 1e6, "cheapest_cost_usd": least / 1e6, "difference_usd": (paid - least) / 1e6},
    "failures": [{"shape": key, "count": len(hits), "first_at": min(hits)[0], "last_at": max(hits)[0],
                  "examples": list(dict.fromkeys(run for _, run in hits))[:3]} for key, hits in clusters.items()]}))
