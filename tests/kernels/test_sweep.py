from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import testing
from kernels_pallas.few_row_gemm import mosaic_gpu, sweep, triton

TINY = sweep.Product(64, 96)


@pytest.fixture
def tiny(monkeypatch):
    """One small product; its kernels run in the interpreter."""
    monkeypatch.setattr(sweep, "PRODUCTS", {"o": TINY})
    monkeypatch.setattr(sweep, "FEW_ROWS", {"o": ((16, 32, 4, 2, False), (32, 32, 4, 2, True, 3))})
    monkeypatch.setattr(sweep, "EARLY", {"o": ()})
    monkeypatch.setattr(sweep, "CALLS", 3)

    def interpreted(*args, early_launch, interpret, **kwargs):
        assert early_launch and not interpret
        return real(*args, interpret=True, **kwargs)

    real = triton.few_row_gemm
    monkeypatch.setattr(triton, "few_row_gemm", interpreted)


def jobs():
    return list(sweep.product_jobs("o", 2, sweep.random_weights(TINY)[:2]))


def test_each_config_is_timed_beside_xlas_product(tiny):
    rows = list(sweep.time_jobs(jobs(), bandwidth=1.0))
    assert [row["config"] for row in rows] == [
        "xla",
        "16 x 64, 4 warps, 8 stages, x first",
        "16 x 32, 4 warps, 2 stages, x first",
        "32 x 32, 4 warps, 2 stages, weight first, 3 splits",
    ]
    assert all(row["us"] > 0 and row["share_of_copy_bandwidth"] > 0 for row in rows)


def test_what_is_wrong_or_does_not_compile_is_said_and_not_timed(tiny):
    xla, job, *_ = jobs()

    def wrong(carry, x, weights):
        return job.chain(carry, x, weights[1:])

    def refused(carry, x, weights):
        raise ValueError("no room for it\nand more")

    found = [xla, job._replace(chain=wrong), job._replace(chain=refused)]
    _, wrong_row, refused_row = sweep.time_jobs(found, bandwidth=1.0)
    assert wrong_row["note"].startswith("wrong: error")
    assert refused_row["note"] == "not compiled: no room for it"
    assert "us" not in wrong_row | refused_row


@pytest.mark.nightly
@pytest.mark.parametrize("num_rows", [1, 32, 64, 96, 128])
def test_every_launch_lowers_for_cuda(num_rows):
    for name, product in sweep.PRODUCTS.items():
        rows = product.outputs * (2 if product.swiglu else 1)
        x, weight = (
            jax.ShapeDtypeStruct((each, product.width), jnp.bfloat16) for each in (num_rows, rows)
        )
        for config in sweep.configs(name, num_rows):
            run = functools.partial(
                triton.few_row_gemm, swiglu=product.swiglu, interpret=False, config=config
            )
            text = testing.lower_for_cuda(run, x, weight, None)
            assert text.count("custom_call") == 1, (name, config)


@pytest.mark.nightly
def test_every_launch_through_mosaic_lowers_for_cuda():
    lacks_mosaic()
    for num_rows, table in sweep.MOSAIC.items():
        for name, product in sweep.PRODUCTS.items():
            rows = product.outputs * (2 if product.swiglu else 1)
            args = [
                jax.ShapeDtypeStruct((each, product.width), jnp.bfloat16)
                for each in (num_rows, rows)
            ]
            for each in table[name]:
                config = mosaic_gpu.Config(*each)
                run = functools.partial(
                    mosaic_gpu.few_row_gemm, swiglu=product.swiglu, config=config
                )
                assert testing.lower_for_cuda(run, *args).count("custom_call") == 1


def lacks_mosaic():
    if jax.__version_info__ < (0, 11):
        pytest.skip("lacks a jax that interprets Mosaic kernels: 0.11 or later")
