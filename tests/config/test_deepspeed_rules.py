"""DeepSpeed's own keys: what cannot work is refused with key, value and repair."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

from ds_infinipipe.config.deepspeed import check_deepspeed_settings, require_optimizer
from ds_infinipipe.config.deepspeed_rules import SCHEDULERS, ZERO_KEYS
from ds_infinipipe.config.section import derive_deepspeed_config
from ds_infinipipe.errors import ConfigError

_HUGE = 10**400


def check(**changes: Any) -> dict[str, Any]:
    return check_deepspeed_settings({"train_batch_size": 8, **changes})


def zero(**fields: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **fields}}


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": params}}


def scheduler(kind: Any, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (zero(cpu_offload=True), "zero_optimization.cpu_offload is True: only the optimizer"),
        (zero(cpu_offload_param=True), "cpu_offload_param is True: only the optimizer"),
        (zero(cpu_offload_params=True), "cpu_offload_params is True: only the"),
        (zero(cpu_offload=1), "cpu_offload is 1: only the optimizer"),
        (zero(offload_param="cpu"), "offload_param is 'cpu'; it must be an object"),
        (zero(zenflow={}), "zenflow is {}: only the optimizer"),
        (zero(offload_param={"device": "cpu"}), 'only the optimizer .* {"device": "cpu"}'),
        (zero(offload_optimizer={"device": "nvme"}), "'nvme': .* host memory only: set it to cpu"),
        (zero(offload_optimizer={"device": "cpu", "ratio": 0.5}), "ratio is 0.5: all of the opt"),
        (zero(offload_optimizer={"pin_memori": True}), "unknown; did you mean 'pin_memory'"),
        (zero(offload_optimizer={"pin_memory": 1}), "pin_memory is 1; it must be true or false"),
        (zero(stage=0, offload_optimizer={"device": "cpu"}), "'cpu' but .*stage is 0: set the"),
        (zero(mics_shard_size=8), "mics_shard_size is 8: MiCS"),
        (zero(overlap_com=True), "overlap_com is unknown; did you mean 'overlap_comm'"),
        (zero(overlap_comm="yes"), "overlap_comm is 'yes'; it must be true or false"),
        (zero(reduce_bucket_size=0), "reduce_bucket_size is 0; it must be a whole number"),
        (zero(reduce_bucket_size=math.inf), "reduce_bucket_size is inf; it must be a whole"),
        (zero(stage3_max_live_parameters="1e9"), "stage3_max_live_parameters is '1e9'"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled is True"),
        ({"communication_data_type": "fp16"}, "communication_data_type is 'fp16': use fp32"),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, "grad_accum_dtype is 'fp16': use fp32"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "'bf16' but bf16 is off"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled is 1; it must be true or false"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true: switch one off"),
        ({"fp16": {"auto_cast": True}}, "fp16.auto_cast is True"),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale is -1; it must be a number below"),
        ({"fp16": {"loss_scale": True}}, "fp16.loss_scale is True"),
        ({"fp16": {"loss_scale_window": 0}}, "loss_scale_window is 0; .* of at least 1"),
        ({"fp16": {"initial_scale_power": 64}}, "initial_scale_power is 64; .* at most 63"),
        ({"fp16": {"hysteresis": 1.5}}, "hysteresis is 1.5; it must be a whole number"),
        ({"fp16": {"min_loss_scale": 0}}, "min_loss_scale is 0; .* of at least 1"),
        ({"fp16": {"hysterisis": 2}}, "hysterisis is unknown; did you mean 'hysteresis'"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile is True"),
        ({"pipeline": {"stages": 2}}, "set infinipipe.parallel.pp"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency.enabled is True"),
        ({"data_efficiency": {"data_sampling": {}}}, "data_efficiency is .* remove the section"),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled is 'yes'; it must be true or false"),
        ({"bf16": {"enabled": 1}}, "bf16.enabled is 1; it must be true or false"),
        ({"bf16": True}, "bf16 is True; it must be an object"),
        ({"bfloat16": {"enabled": "yes"}}, "bf16.enabled is 'yes'"),
        ({"bfloat16": {}, "bf16": {}}, "both given"),
        ({"gradient_clipping": -1}, "gradient_clipping is -1; it must be a number of at least"),
        ({"gradient_clipping": math.nan}, "gradient_clipping is nan"),
        ({"gradient_clipping": _HUGE}, "gradient_clipping is 1000"),
        ({"gradient_clipping": True}, "gradient_clipping is True"),
        ({"gradient_clipping": "1.0"}, "gradient_clipping is '1.0'"),
        ({"gradient_clipping": None}, "gradient_clipping is None"),
        ({"steps_per_print": 0}, "steps_per_print is 0; it must be an integer of at least 1"),
        ({"steps_per_print": 1.5}, "steps_per_print is 1.5"),
        ({"train_batch_size": "abc"}, "train_batch_size is 'abc'"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        check(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity",
        "nebula", "progressive_layer_drop", "quantize_training", "sparse_attention",
        "sparse_gradients",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [5, {"enabled": False}, {"enabled": True}])
def test_a_key_deepspeed_has_removed_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key} is .*: DeepSpeed has removed it"):
        check(**{key: value})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"optimizer": {"params": {}}}, "optimizer is .*; give"),
        ({"optimizer": {"type": 3}}, "optimizer.type is 3; only Adam and AdamW"),
        *(
            ({"optimizer": {"type": kind}}, f"type is '{kind}'; only Adam and AdamW")
            for kind in ("SGD", "Lion", "Lamb", "Muon", "OneBitAdam", "Adagrad", "Adamm")
        ),
        ({"optimizer": {"type": "AdamW", "lr": 1}}, "optimizer.lr is unknown"),
        ({"optimizer": {"type": "AdamW", "params": 3}}, "optimizer.params is 3; it must be an obj"),
        ({"optimizer": {"type": "AdamW", "params": None}}, "optimizer.params is None"),
        (adam(lr="1e-3"), "lr is '1e-3'; it must be a number of at least 0"),
        (adam(lr=-1), "lr is -1"),
        (adam(lr=math.nan), "lr is nan"),
        (adam(lr=_HUGE), "lr is 1000"),
        (adam(lr="auto"), 'optimizer.params.lr is "auto"'),
        (adam(eps=-1e-8), "eps is -1e-08"),
        (adam(weight_decay=True), "weight_decay is True"),
        (adam(betas=0.9), "betas is 0.9; it must be a list of two numbers"),
        (adam(betas=[0.9]), "betas is"),
        (adam(betas=[0.9, 1.0]), "of at least 0 and below 1"),
        (adam(beta=[0.9, 0.9]), "beta is unknown; did you mean 'betas'"),
        (adam(max_grad_norm=1.0), "set gradient_clipping instead"),
        (adam(torch_adam="yes"), "torch_adam is 'yes'"),
        ({"scheduler": {}}, "scheduler.type is None; it must be one of LRRangeTest"),
        (scheduler("Warmup"), "scheduler.type is 'Warmup'; it must be one of"),
        (scheduler("StepLR"), "scheduler.type is 'StepLR'"),
        ({"scheduler": {"type": "WarmupLR", "params": 3}}, "scheduler.params is 3"),
        (scheduler("WarmupDecayLR"), "lacks total_num_steps, which WarmupDecayLR needs"),
        (scheduler("OneCycle"), "lacks cycle_min_lr and cycle_max_lr"),
        (scheduler("WarmupCosineLR", total_num_steps=0), "total_num_steps is 0"),
        (scheduler("WarmupLR", warmup_num_steps=2.5), "warmup_num_steps is 2.5"),
        (scheduler("WarmupLR", warmup_type="cosine"), "warmup_type is 'cosine'"),
        (scheduler("WarmupLR", warmup_max_lr="auto"), 'warmup_max_lr is "auto"'),
        (scheduler("WarmupLR", warmup_steps=5), "warmup_steps is unknown; did you mean"),
    ],
)
def test_optimizers_and_schedulers_are_checked(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check(**changes)


def test_usual_settings_pass() -> None:
    config = {
        "bf16": {"enabled": True, "immediate_grad_update": True},
        "gradient_clipping": 1,
        "steps_per_print": None,
        "communication_data_type": "bf16",
        "data_types": {"grad_accum_dtype": "bf16"},
        "pipeline": {},
        "data_efficiency": {"enabled": False},
        "hybrid_engine": {"enabled": False},
        **zero(reduce_bucket_size=5e8, overlap_comm="auto", offload_param=None),
        **adam(lr=2e-5, betas=[0.9, 0.95], eps="auto", weight_decay=0, fused=True),
        **scheduler("WarmupDecayLR", total_num_steps=100, warmup_max_lr=1e-3, warmup_num_steps=5),
    }
    checked = check(**config)
    assert checked["optimizer"]["params"]["lr"] == 2e-5
    assert "eps" not in checked["optimizer"]["params"]


def test_deepspeeds_own_adam_takes_its_own_parameters() -> None:
    check(**adam(torch_adam=False, bias_correction=True))
    with pytest.raises(ConfigError, match="bias_correction is unknown"):
        check(**adam(bias_correction=True))


def test_the_older_name_of_bf16_is_understood() -> None:
    given = {"train_batch_size": 2, "bfloat16": {"enabled": True}, **zero()}
    derived = derive_deepspeed_config(given, 1)
    assert derived["bf16"] == {"enabled": True} and "bfloat16" not in derived
    assert derived["data_types"] == {"grad_accum_dtype": "fp32"}


def test_a_run_without_optimizer_is_told_to_give_one() -> None:
    with pytest.raises(ConfigError, match="there is no optimizer: give"):
        require_optimizer({})
    require_optimizer(adam())


def test_our_list_of_zeros_keys_is_deepspeeds() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    known = set(DeepSpeedZeroConfig.model_fields)
    known |= {str(f.alias) for f in DeepSpeedZeroConfig.model_fields.values() if f.alias}
    assert known == ZERO_KEYS


def test_our_lists_of_schedulers_and_their_parameters_are_deepspeeds() -> None:
    from deepspeed.runtime import lr_schedules

    assert sorted(lr_schedules.VALID_LR_SCHEDULES) == sorted(SCHEDULERS)
    for name, (required, known) in SCHEDULERS.items():
        parameters = dict(inspect.signature(getattr(lr_schedules, name)).parameters)
        del parameters["optimizer"]
        assert set(known) == set(parameters)
        needed = {n for n, p in parameters.items() if p.default is inspect.Parameter.empty}
        assert set(required) == needed
