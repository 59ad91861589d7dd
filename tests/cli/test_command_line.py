from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl_core.cli.app import COMMANDS, main

HEAVY = ("torch", "pydantic", "triton", "flashinfer", "flash_attn", "transformers", "typer")
PROBE = f"""
import sys, time
start = time.process_time()
from minisgl_core.cli.app import main
code = main(sys.argv[1:])
print("heavy", [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
print("seconds", time.process_time() - start, file=sys.stderr)
sys.exit(code)
"""


LONGEST_S = 1.0
"""Of processor time: twice what is needed, since other processes slow each core down. Importing torch takes longer."""
pytestmark = pytest.mark.usefixtures("no_settings")


@pytest.mark.parametrize("arguments", [["--help"], [], ["--version"], ["plugins"], ["plugins", "--json"]])
def test_help_and_plugins_import_nothing_heavy_and_answer_at_once(arguments: list[str]) -> None:
    best = float("inf")
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        heavy, seconds = done.stderr.strip().splitlines()[-2:]
        assert heavy == "heavy []"
        best = min(best, float(seconds.partition(" ")[2]))
        if best < LONGEST_S:
            break
    assert best < LONGEST_S


def test_no_command_and_help_list_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    without = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == without
    assert all(name in without and entry.help in without for name, entry in COMMANDS.items())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_takes_json_where_it_prints_a_table(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert COMMANDS[name].help in text
    assert ("--json" in text) == (name not in ("chat", "serve"))


def test_plugins_lists_the_core(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    core = next(plugin for plugin in data["plugins"] if plugin["distribution"] == "minisgl-core")
    assert core["failure"] is None and "graph:eager@minisgl-core" in core["backends"]
    assert Path(core["file"]).name == "plugin.py"
    assert main(["plugins"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("DISTRIBUTION") and "platform:cuda" in text


def test_plugins_obeys_the_lists_of_the_config_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("minisgl.toml").write_text("[plugins]\nallow = []\n")
    assert main(["plugins", "--json"]) == 0
    plugins = json.loads(capsys.readouterr().out)["plugins"]
    assert all(plugin["excluded"] == "allow" for plugin in plugins if plugin["distribution"] != "minisgl-core")
    Path("other.toml").write_text('[plugins]\ndeny = ["no-such-plugin"]\n')
    assert main(["plugins", "--config", "other.toml"]) == 2
    assert capsys.readouterr().err.startswith("error: plugins.deny names 'no-such-plugin'")


def test_explain_answers_with_a_plan_or_with_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "--geometry", "qwen3-0.6b", "--device", "sm90", "--json"]
    Path("minisgl.toml").write_text("[plugins]\nallow = []\n")
    assert main(arguments) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["plan"] is None and data["device"] == "cuda sm90" and data["elsewhere"] is True
    assert "no backend for attention.decode" in data["error"]
    graph = next(entry for entry in data["entries"] if entry["entry"] == "graph")
    eager = graph["candidates"][0]
    assert (eager["backend"], eager["status"]) == ("eager@minisgl-core", "rejected")
    assert eager["would_allow"] == ["cuda_graph_max_bs=0"]
    assert main(arguments[:-1]) == 1
    text = capsys.readouterr().out
    assert "no plan" in text and "> to allow it: cuda_graph_max_bs=0" in text


def test_explain_names_the_list_that_keeps_a_plugin_out(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("minisgl_cpu_sim")
    Path("minisgl.toml").write_text('[plugins]\ndeny = ["minisgl-cpu-sim"]\n')
    assert main(["explain", "--geometry", "tiny", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "; take minisgl-cpu-sim out of plugins.deny\n" in text
    assert "\n  plugins.deny keeps out minisgl-cpu-sim\n" in text
    assert text.splitlines()[-3] == "plugins.deny keeps out minisgl-cpu-sim: their backends are no candidates"


def test_explain_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("minisgl_cpu_sim")
    arguments = ["explain", "--geometry", "llama3-8b", "--device", "cpu", "--page-size", "16", "--dtype", "float32"]
    chosen = ["--backend", "attention=torch", "--backend", "kv=torch"]
    assert main([*arguments, *chosen, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["page_size"], plan["dtype"], plan["graph"]) == (16, "float32", False)
    assert plan["buckets"][0]["choice"]["name"] == "torch"
    assert main([*arguments, *chosen, "--cuda-graph-max-bs", "4"]) == 0
    text = capsys.readouterr().out
    assert "decode steps in graphs" in text and "torch@minisgl-cpu-sim" in text and "rejected   for other" in text


@pytest.mark.parametrize(
    ("more", "taken", "not_taken"),
    [
        ((), "act_and_mul and add_rms_norm", {}),
        (("--tp-size", "2"), "act_and_mul", {"add_rms_norm": "with several ranks the norm stays with its all-reduce"}),
        (
            ("--backend", "ops.add_rms_norm=composed"),
            "act_and_mul",
            {"add_rms_norm": "ops.add_rms_norm is composed@minisgl-core, of another distribution"},
        ),
        (
            ("--backend", "ops=composed"),
            "",
            {
                "add_rms_norm": "ops.add_rms_norm is composed@minisgl-core, of another distribution",
                "act_and_mul": "ops.act_and_mul is composed@minisgl-core, of another distribution",
            },
        ),
    ],
)
def test_explain_says_what_products_may_be_fused_with(
    more: tuple[str, ...], taken: str, not_taken: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("minisgl_cpu_sim")
    assert main(["explain", "--geometry", "qwen3-0.6b", "--device", "cpu", "--backend", "linear=fused", *more]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if "into its products" in line]
    mine = "fused@minisgl-cpu-sim"
    may = f"{mine} may take {taken} into its products, where its options allow it and it finds that faster"
    others = [f"{mine} could take {op} into its products, but {why}" for op, why in not_taken.items()]
    assert shown == [*([may] if taken else []), *others]


def test_explain_reads_a_model_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "hidden_act": "silu",
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert main(["explain", "--model", "model", "--device", "cpu", "--json", "--tp-size", "2"]) == 2
    error = capsys.readouterr().err
    assert "9 query heads and 3 kv heads cannot be cut over tp_size 2" in error
    main(["explain", "--model", "model", "--device", "cpu", "--json"])
    assert json.loads(capsys.readouterr().out)["architecture"] == "LlamaForCausalLM"


@pytest.mark.parametrize(("device", "dtype"), [("sm90", "bfloat16"), ("cpu", "float32")])
def test_explain_without_a_model_is_about_the_demo_models_shape_and_fetches_nothing(
    device: str, dtype: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*_: object) -> None:
        raise AssertionError("nothing is downloaded")

    monkeypatch.setattr("minisgl_core.demo_model.ensure_demo_model", fetch)
    assert main(["explain", "--device", device, "--json"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert (data["model"], data["plan"]["dtype"], data["architecture"]) == ("smollm2-135m", dtype, "LlamaForCausalLM")
    assert err == (
        f"no model is named: this is about the demo model's shape (smollm2-135m, {dtype}); "
        "--model DIR or --geometry NAME asks about another\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explian"], "error: unknown command 'explian'; did you mean 'explain'?"),
        (
            ["frobnicate"],
            "error: unknown command 'frobnicate'; the commands are generate, chat, serve, plugins, explain",
        ),
        (["plugins", "--jsn"], "error: No such option"),
        (["--nonsense"], "error: No such option"),
        (["explain", "--geometry", "qwen3-0.6"], "error: unknown geometry 'qwen3-0.6'; did you mean 'qwen3-0.6b'?"),
        (["explain", "--model", "x", "--geometry", "llama3-8b"], "error: --model and --geometry are both given"),
        (
            ["explain", "--geometry", "llama3-8b", "--device", "tpu"],
            "error: --device is 'tpu'; use cpu, cuda, or such as",
        ),
        (
            ["explain", "--geometry", "llama3-8b", "--page-size", "x"],
            "error: engine.page_size is 'x' (from --page",
        ),
        (["explain", "--geometry", "llama3-8b", "--backend", "kv"], "error: --backend 'kv' is not ROLE=NAME"),
        (["explain", "--geometry", "llama3-8b", "--backend", "vk=x"], "error: unknown key 'vk' in backends"),
        (["explain", "--model", "nowhere/at/all"], "error: "),
    ],
)
def test_wrong_calls_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(message)
    assert captured.err.count("\n") == 1


def test_an_unknown_backend_is_exit_code_2_and_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "--geometry", "llama3-8b", "--device", "cpu", "--backend", "attention=no-such-backend"]
    assert main(arguments) == 2
    quiet = capsys.readouterr().err
    assert quiet.startswith("error: no plugin offers the attention backend 'no-such-backend'")
    assert quiet.count("\n") == 1
    for place in (0, len(arguments)):
        assert main([*arguments[:place], "--debug", *arguments[place:]]) == 2
        error = capsys.readouterr().err
        assert "Traceback" in error and error.endswith(quiet)


def test_a_bug_of_ours_is_said_to_be_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("minisgl_core.cli.plugins.discover", broken)
    assert main(["plugins"]) == 1
    assert capsys.readouterr().err.startswith("error: internal error: ZeroDivisionError: a bug; please report it")


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    runs = (
        f"{sys.executable} -c 'import sys; from minisgl_core.cli.app import main; sys.exit(main())' plugins | head -c 1"
    )
    done = subprocess.run(["bash", "-c", runs], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("D", "")


def test_a_kernel_that_crashes_leaves_a_traceback() -> None:
    program = "import ctypes\nfrom minisgl_core.cli.app import main\nmain()\nctypes.string_at(0)"
    done = subprocess.run(
        [sys.executable, "-c", program, "--version"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr and "ctypes" in done.stderr
