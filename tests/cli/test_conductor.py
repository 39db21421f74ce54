"""`baton conductor`: what fits is loaded, checked, shadowed and put into force, and what does not is refused in words.

The server is a stub of vLLM's published wire format; `make test-vllm` has the real one.
"""

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.__main__ import main
from app.cli.commands import parse
from app.core.plan.proposals import schema
from app.core.transparency.notes import Signer, sign
from app.core.transparency.version_signatures import TrustedSigners, sign_version
from app.lab import manifest
from app.lab.manifest import GoldenPrompt, Manifest
from app.process.config import configure
from tests.deploy.test_readme import blocks
from tests.harness.vllm_stub import VllmStub, tokens, vllm_stub

PLAN = '{"steps":[{"worker":1,"subtask":"Solve it.","access":["user"]}]}'
OTHER = PLAN.replace("1", "0")
POOL = """
[providers.here]
format = "openai"
base_url = "{url}"
options = {{ positional = true }}
[providers.rehearsal]
format = "rehearsal"
options = {{ delay = 0 }}
[workers.planner]
provider = "here"
model = "planner"
price = {{ input = 0, output = 0 }}
pooled = false
[workers.sage]
provider = "rehearsal"
model = "sage"
price = {{ input = 1, output = 2 }}
[workers.abacus]
provider = "rehearsal"
model = "abacus"
price = {{ input = 1, output = 2 }}
[tiers.baton-ultra]
pool = ["sage", "abacus"]
conductor = {{ kind = "model", worker = "planner"{prompt} }}
limits = {{ steps = {steps} }}
"""

pytestmark = pytest.mark.usefixtures("embedded_database")


def write_adapter(folder: Path, base: str | None, **changes: Any) -> Manifest:
    """A folder with weights and a manifest: an adapter of `base`, or a whole model."""
    folder.mkdir()
    kind = "adapter" if base else "model"
    (folder / manifest.WEIGHTS[kind]).write_bytes(folder.name.encode())
    for name in manifest.TOKENIZER:
        (folder / name).write_text("{}")
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    name = manifest.version("planner", manifest.sha256(folder.name.encode()))
    questions = [[{"role": "user", "content": f"question {n}"}] for n in range(10)]
    golden = [
        GoldenPrompt(messages=messages, workers=2, steps=3, tokens=tokens(messages[0]["content"]), plan=PLAN)
        for messages in questions
    ]
    facts = {"kind": kind, "name": name, "base": base or name, "tokenizer_sha256": manifest.tokenizer_sha256(folder)}
    facts |= {"prompt": "general", "template": "plan-1", "grammar": "guidance", "steps": 5, "workers": 6}
    facts |= {"reward": "", "world": "", "commit": "c0ffee", "evaluation": {}}
    return manifest.write(folder, golden, **facts | changes)


class Bench:
    """A pool file, a base, an adapter, and the stub that serves the base."""

    def __init__(self, folder: Path, stub: VllmStub, base: Manifest) -> None:
        self.folder, self.stub = folder, stub
        self.adapter = write_adapter(folder / "adapter", base.name)
        stub.models += ["planner", base.name]
        stub.plans = dict.fromkeys([*stub.models, self.adapter.name], lambda _: PLAN)
        self.pool()

    def pool(self, prompt: str = "", steps: int = 3) -> None:
        """Write the pool file."""
        (self.folder / "pool.toml").write_text(POOL.format(url=self.stub.url, prompt=prompt, steps=steps))

    def run(self, *words: str, **settings: str) -> int:
        """`baton conductor ...` with further settings; the exit status."""
        environ = {"BATON_POOL": str(self.folder / "pool.toml"), "BATON_DATA_DIR": str(self.folder)}
        return main(["conductor", *words], environ | {f"BATON_{name}": value for name, value in settings.items()})

    def deploy(self, folder: str = "adapter") -> int:
        """Deploy a folder."""
        return self.run("deploy", "planner", str(self.folder / folder), "--who", "ann")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    base = write_adapter(tmp_path / "base", None)
    with vllm_stub() as stub:
        yield Bench(tmp_path, stub, base)


@pytest.mark.long
def test_a_version_is_loaded_checked_put_into_force_and_taken_back(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    name = bench.adapter.name
    assert bench.deploy() == 0
    assert name in bench.stub.models
    loading = next(body for path, body in bench.stub.requests if path == "/v1/load_lora_adapter")
    assert loading == {"lora_name": name, "lora_path": str(bench.folder / "adapter")}
    body_sent = next(body for path, body in bench.stub.requests if path == "/v1/chat/completions")
    assert (body_sent["model"], body_sent["temperature"]) == (name, 0)
    assert body_sent["response_format"]["json_schema"]["schema"] == schema(2, 3, 600)
    output = capsys.readouterr().out
    assert '"valid": 10, "known": 10, "agreed": 10' in output
    for words, standing in (
        (("canary", "planner", name, "0.25"), f"canary {name} for 25% of the runs"),
        (("promote", "planner", name), f"planner: {name}; loaded: {name}"),
        (("rollback", "planner"), "planner: the pool file's own model"),
        (("unload", "planner", name), "loaded: none"),
    ):
        assert bench.run(*words, "--who", "bob") == 0
        assert standing in capsys.readouterr().out
    assert name not in bench.stub.models
    assert bench.run("ls") == 0
    listed = capsys.readouterr().out
    kinds = ["loaded", "canary", "promoted", "rolled_back", "unloaded"]
    places = [listed.index(f" {kind} ") for kind in kinds]
    assert places == sorted(places)
    assert (listed.count(" ann "), listed.count(" bob ")) == (1, 4)


@pytest.mark.long
def test_a_version_whose_conditions_do_not_hold_is_promoted_only_with_a_reason(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    name, pool = bench.adapter.name, bench.folder / "pool.toml"
    pool.write_text(pool.read_text() + "[tiers.baton-ultra.promotion]\nmin_pairs = 50\nmax_cost_increase = 0.1\n")
    assert bench.deploy() == 0
    capsys.readouterr()
    assert bench.run("promote", "planner", name) == 1
    output = capsys.readouterr()
    assert all(word in output.out for word in ("min_pairs", "50", "max_cost_increase", "+10.0%", "open"))
    assert "Not promoted" in output.err
    assert bench.run("promote", "planner", name, "--json") == 1
    assert json.loads(capsys.readouterr().out)["tiers"][0]["evidence"]["count"] == 0
    assert bench.run("promote", "planner", name, "--force", "incident 12", "--json") == 0
    (change,) = json.loads(capsys.readouterr().out)["changes"]
    assert (change["kind"], json.loads(change["note"])["forced"]) == ("promoted", "incident 12")


OURS, OTHERS = (Signer(name, bytes([place]) * 32) for place, name in enumerate(("ours", "others")))


@pytest.mark.long
def test_only_versions_that_a_known_key_has_signed_are_loaded_and_put_into_force(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    name, adapter = bench.adapter.name, str(bench.folder / "adapter")
    ours = {"CONDUCTOR_SIGNERS": str(OURS.verifier)}

    def sign_and_deploy(signer: Signer) -> None:
        assert bench.run("sign", adapter, CONDUCTOR_SIGNING_KEY=signer.secret()) == 0
        assert f"BATON_CONDUCTOR_SIGNERS={signer.verifier}" in capsys.readouterr().out

    def refuses(*words: str, message: str, **settings: str) -> None:
        assert bench.run(*words, **settings) == 2
        assert message in capsys.readouterr().err

    deploys = ("deploy", "planner", adapter)
    refuses("sign", adapter, message="BATON_CONDUCTOR_SIGNING_KEY: is not set")
    refuses(*deploys, message=f"{name} is not signed", **ours)
    sign_and_deploy(OTHERS)
    refuses(*deploys, message="No known key has signed the note", **ours)
    assert name not in bench.stub.models
    assert bench.run(*deploys, CONDUCTOR_UNSIGNED="warn", **ours) == 0
    assert "Warning: the signature of planner@" in capsys.readouterr().err
    refuses("promote", "planner", name, message="No known key has signed the note", **ours)
    sign_and_deploy(OURS)
    assert bench.run(*deploys, **ours) == 0
    assert bench.run("canary", "planner", name, "0.5", **ours) == 0
    assert '"signed_by": ["ours"]}' in capsys.readouterr().out
    refuses("promote", "planner", name, message="No known key", CONDUCTOR_SIGNERS=str(OTHERS.verifier))
    assert bench.run("promote", "planner", name, **ours) == 0
    refuses("serve", str(bench.folder / "base"), "--dry-run", message="is not signed", **ours)
    bench.stub.models.remove(name)
    card = Path(adapter) / manifest.MANIFEST
    card.write_text(card.read_text().replace("c0ffee", "c0ffeecake"))
    refuses("restore", "planner", message="is not the one that was signed", **ours)
    card.write_text(card.read_text().replace("c0ffeecake", "c0ffee"))
    added = Path(adapter) / "new_embeddings.safetensors"
    added.write_bytes(b"others")
    refuses("restore", "planner", message="new_embeddings.safetensors is not in the manifest", **ours)
    secret = OURS.secret()
    refuses("sign", adapter, message="new_embeddings.safetensors is not in the", CONDUCTOR_SIGNING_KEY=secret)
    added.unlink()
    template = Path(adapter) / "additional_chat_templates" / "tool_use.jinja"  # vLLM reads it
    template.parent.mkdir()
    template.write_text("Obey me.")
    refuses("restore", "planner", message="additional_chat_templates/tool_use.jinja is not in the manifest", **ours)
    template.unlink()
    assert bench.run("restore", "planner", **ours) == 0


def test_a_signature_does_not_serve_for_another_version_and_not_for_another_kind_of_note(bench: Bench) -> None:
    name, hashed, signers = bench.adapter.name, manifest.sha256(b"{}"), TrustedSigners((OURS.verifier,))
    assert signers.objection(name, sign_version(name, hashed, OURS), hashed) == ""
    assert signers.objection(name, sign_version(name, hashed, OURS)) == "", "a promotion has no folder at hand"
    assert "is that of planner@0" in signers.objection(name, sign_version("planner@0", hashed, OURS), hashed)
    assert "of something else" in signers.objection(name, sign(f"log\n{name}\n{hashed}\n", [OURS]), hashed)
    broken = sign_version(name, hashed, OURS).replace(hashed, manifest.sha256(b"[]"))
    assert "The signature of ours is wrong" in signers.objection(name, broken)
    assert TrustedSigners().objection(name, "") == ""


def test_a_new_manifest_has_no_signature(bench: Bench) -> None:
    adapter = bench.folder / "adapter"
    manifest.sign(adapter, OURS)
    assert manifest.signature(adapter)
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    manifest.describe(adapter, bench.folder / "base", None)
    assert manifest.signature(adapter) == ""


def assert_refused(bench: Bench, capsys: pytest.CaptureFixture[str], message: str) -> None:
    """The adapter is refused with these words; nothing is left on the server or on record."""
    assert bench.deploy() != 0
    assert message in capsys.readouterr().err
    assert bench.adapter.name not in bench.stub.models
    assert bench.run("promote", "planner", bench.adapter.name) == 2
    assert "is not loaded" in capsys.readouterr().err


def other_base(bench: Bench) -> None:
    bench.stub.models[:] = ["planner", "planner@000000000000"]


def other_tokenizer(bench: Bench) -> None:
    bench.stub.shift = 1


def other_prompt(bench: Bench) -> None:
    bench.pool(prompt=', prompt = "compact"')


def more_steps(bench: Bench) -> None:
    bench.pool(steps=6)


def no_adapters(bench: Bench) -> None:
    bench.stub.adapters = False


def bad_adapter(bench: Bench) -> None:
    bench.stub.bad = {str(bench.folder / "adapter")}


def no_plans(bench: Bench) -> None:
    bench.stub.plans[bench.adapter.name] = lambda text: PLAN if "3" in text else '{"steps":[]}'


def other_plans(bench: Bench) -> None:
    bench.stub.plans[bench.adapter.name] = lambda text: OTHER if text[-1] in "34" else PLAN


def nobody(bench: Bench) -> None:
    bench.stub.models.clear()
    (bench.folder / "pool.toml").write_text(
        (bench.folder / "pool.toml").read_text().replace(bench.stub.url, "http://127.0.0.1:9/v1")
    )


def no_text(bench: Bench) -> None:
    (bench.folder / "adapter" / manifest.GOLDEN).write_bytes(b"\xff")


def change_weights(bench: Bench) -> None:
    (bench.folder / "adapter" / "adapter_model.safetensors").write_bytes(b"others")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (other_base, "the base of planner@"),
        (other_tokenizer, "golden prompt 0 has other tokens on this server"),
        (other_prompt, 'is "compact", and planner@'),
        (more_steps, "allows 6 steps, and planner@"),
        (no_adapters, "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
        (bad_adapter, "status 400: LoRA rank 64 is greater than max_lora_rank 16."),
        (no_plans, "9 of 10 golden prompts led to no valid plan"),
        (other_plans, "8 of 10 golden plans came out as they should; 90% must"),
        (nobody, "could not be reached"),
        (no_text, "golden.jsonl: is no text in UTF-8"),
        (change_weights, "adapter_model.safetensors is not the file of the manifest"),
    ],
)
def test_what_does_not_fit_is_refused(
    bench: Bench, capsys: pytest.CaptureFixture[str], spoil: Callable[[Bench], None], message: str
) -> None:
    spoil(bench)
    assert_refused(bench, capsys, message)


def test_a_server_that_does_not_answer_in_time_is_an_error(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.providers.vllm.Management.__init__.__defaults__", (0.2,))
    bench.stub.delay = 0.5
    assert bench.deploy() == 1
    assert "did not answer within 0.2 seconds" in capsys.readouterr().err


@pytest.mark.long
def test_a_version_that_the_server_has_lost_is_not_promoted_but_can_be_rolled_back(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    name = bench.adapter.name
    assert bench.deploy() == 0
    assert bench.run("canary", "planner", name, "0.5") == 0
    bench.stub.models.remove(name)
    assert bench.run("promote", "planner", name) == 2
    assert "no longer answers" in capsys.readouterr().err
    nobody(bench)
    assert bench.run("rollback", "planner") == 0


@pytest.mark.long
def test_versions_are_loaded_again_into_each_endpoint_that_has_lost_them(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """A restarted vLLM has no adapters. What was deployed comes back; a folder with other weights does not."""
    name, pool = bench.adapter.name, bench.folder / "pool.toml"
    with vllm_stub(*bench.stub.models) as replica:
        replica.plans = bench.stub.plans
        both = f'endpoints = [{{ base_url = "{bench.stub.url}" }}, {{ base_url = "{replica.url}" }}]'
        pool.write_text(pool.read_text().replace(f'base_url = "{bench.stub.url}"', both))
        assert bench.deploy() == 0
        assert (name in bench.stub.models, name in replica.models) == (True, True)
        replica.models.remove(name)
        assert bench.run("promote", "planner", name) == 2, "one replica does not answer to it"
        assert bench.run("restore", "planner") == 0
        assert f"loaded again: {name}" in capsys.readouterr().out
        assert name in replica.models
        assert bench.run("restore", "planner", "--json") == 0
        assert json.loads(capsys.readouterr().out)["restored"] == []
        replica.models.remove(name)
        replica.shift = 1
        assert bench.run("restore", "planner") == 2
        assert "has other tokens on this server" in capsys.readouterr().err
        replica.shift = 0
        change_weights(bench)
        assert bench.run("restore", "planner") == 2
        assert "is not the file of the manifest" in capsys.readouterr().err
        assert (name in bench.stub.models, name in replica.models) == (True, False)


@pytest.mark.long
def test_what_cannot_be_restored_keeps_nothing_else_from_it(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder of an earlier version is gone, and one of the servers is away."""
    name, pool = bench.adapter.name, bench.folder / "pool.toml"
    old = write_adapter(bench.folder / "old", bench.adapter.base)
    bench.stub.plans[old.name] = bench.stub.plans[name]
    assert bench.deploy("old") == 0
    assert bench.deploy() == 0
    assert bench.run("promote", "planner", name) == 0
    shutil.rmtree(bench.folder / "old")
    bench.stub.models.remove(old.name)
    bench.stub.models.remove(name)
    away = f'endpoints = [{{ base_url = "http://127.0.0.1:9/v1" }}, {{ base_url = "{bench.stub.url}" }}]'
    pool.write_text(pool.read_text().replace(f'base_url = "{bench.stub.url}"', away))
    assert bench.run("restore", "planner") == 2
    output = capsys.readouterr()
    assert f"loaded again: {name}" in output.out
    assert "http://127.0.0.1:9/v1/models could not be reached" in output.err
    assert "No such file or directory" in output.err
    assert name in bench.stub.models


def test_serve_prints_what_it_would_start(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    base = str(bench.folder / "base")
    flags = ("--flag=--enforce-eager", "--flag=--x=it's")
    assert bench.run("serve", base, "--adapters", "--port", "8123", "--dry-run", *flags) == 0
    line = capsys.readouterr().out.strip()
    card = json.loads((bench.folder / "base" / "baton.json").read_text())
    assert line == (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True python3 -m vllm.entrypoints.openai.api_server --enable-prefix-caching "
        f"--served-model-name conductor {card['name']} --model {base} --host 127.0.0.1 --port 8123 "
        "--max-model-len 4096 --structured-outputs-config "
        """'{"backend":"guidance","disable_any_whitespace":true}' """
        """--default-chat-template-kwargs '{"enable_thinking": false}' """
        "--enable-lora --max-loras 4 --max-lora-rank 32 --enforce-eager "
        """'--x=it'"'"'s'"""
    )
    assert bench.run("serve", str(bench.folder / "adapter"), "--dry-run") == 2
    assert "is an adapter; serve its base" in capsys.readouterr().err
    assert bench.run("serve", base, "--python", "/no/such/python") == 2
    assert "name vLLM's interpreter" in capsys.readouterr().err


def test_an_adapter_that_peft_has_made_is_described_from_its_base(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, base = bench.folder / "peft", bench.folder / "base"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    words = ("describe", str(folder), "--base", str(base), "--title", "mine")
    assert bench.run(*words) == 2
    assert "has no adapter_config.json" in capsys.readouterr().err
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    assert bench.run(*words[:-1], "my own/conductor") == 2
    assert "--title my own/conductor: write letters, digits and . _ -" in capsys.readouterr().err
    assert bench.run(*words) == 0
    for text, message in (
        (b"\xff", "mine.jsonl: is no text in UTF-8"),
        (b"\n{\n", "mine.jsonl:2: Invalid JSON"),
        (b'{"messages": []}', "mine.jsonl:1: workers: Field required"),
    ):
        (bench.folder / "mine.jsonl").write_bytes(text)
        assert bench.run(*words, "--golden", str(bench.folder / "mine.jsonl")) == 2
        assert message in capsys.readouterr().err
    card, golden = manifest.read(folder)
    assert (card.kind, card.base, card.steps) == ("adapter", manifest.read(base)[0].name, 5)
    assert {prompt.plan for prompt in golden} == {None}
    bench.stub.plans[card.name] = lambda _: OTHER
    assert bench.deploy("peft") == 0
    assert '"valid": 10, "known": 0' in capsys.readouterr().out


PAGE = (Path(__file__).parents[2] / "deploy" / "docs" / "conductor.md").read_text()


def test_the_pages_commands_are_commands_and_its_pool_is_a_pool(tmp_path: Path) -> None:
    lines = [line for block in blocks("sh", PAGE) for line in block.splitlines() if line]
    verbs = {vars(parse(shlex.split(line)[1:]))["verb"] for line in lines}
    assert all(line.startswith("baton conductor ") for line in lines)
    assert verbs == {
        "export", "describe", "sign", "serve", "deploy", "restore", "shadow", "canary", "promote", "rollback", "unload",
        "ls",
    }  # fmt: skip
    (pool,) = blocks("toml", PAGE)
    worker = '[workers.sage]\nprovider = "rehearsal"\nmodel = "sage"\n[providers.rehearsal]\nformat = "rehearsal"\n'
    (tmp_path / "pool.toml").write_text(pool + worker)
    catalog = configure({"BATON_POOL": str(tmp_path / "pool.toml"), "BATON_DATA_DIR": str(tmp_path)}).catalog
    assert catalog.tiers["baton-ultra"].conductor.prompt == "compact"
