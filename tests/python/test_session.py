"""plan_session and probe."""

import json
import pathlib

import pytest

import ullage

MODELS = pathlib.Path(__file__).resolve().parents[1] / "data" / "models"


def test_a_model_of_the_tests():
    plan = ullage.plan_session(MODELS / "qwen3-tiny", context=64, memory_bytes=1 << 30)
    assert plan.fits and plan.resident_bytes == plan.weights["resident_bytes"] + plan.kv_cache["bytes"]
    kv = plan.kv_cache
    assert kv["bytes"] == kv["bucket"] * kv["position_bytes"] and kv["bucket"] == 512
    assert f"vocab {plan.shape['vocab']:,}" in str(plan)
    assert json.loads(plan.to_json())["parameters"] == plan.parameters


def test_a_config_alone(tmp_path):
    config = json.loads((MODELS / "qwen3-tiny" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    narrow, wide = (ullage.plan_session(tmp_path, weight_type=t) for t in ("bf16", "f32"))
    assert narrow.weights["assumed"] and wide.weights["resident_bytes"] == 2 * narrow.weights["resident_bytes"]


@pytest.mark.parametrize(
    "model, options, code, named",
    [
        ("no/such/folder", {}, 641, "no/such/folder"),
        (MODELS / "qwen3-tiny", {"context": 0}, 601, "context"),
        (MODELS / "qwen3-tiny", {"kv_type": "f8"}, 681, "f8"),
        (MODELS / "qwen3-tiny", {"memory_bytes": 1.5}, 699, "memory_bytes is 1.5"),
    ],
)
def test_refusals(model, options, code, named):
    with pytest.raises(ullage.UllageError) as caught:
        ullage.plan_session(model, **options)
    assert caught.value.code == code and named in str(caught.value)


def test_probe():
    probe = ullage.probe()
    assert probe.version == ullage.version() and probe.cpu["threads"] >= 1 and probe.memory_bytes > 0
    assert "kernels" in str(probe) and json.loads(probe.to_json())["cuda"]["devices"] >= 0
