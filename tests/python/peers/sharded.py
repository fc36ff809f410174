"""A pytest plugin: every n-th test alone, by the variables of GoogleTest's own sharding."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(trylast=True)  # after what an adapter leaves out
def pytest_collection_modifyitems(config, items):
    shards, shard = int(os.environ.get("GTEST_TOTAL_SHARDS", 1)), int(os.environ.get("GTEST_SHARD_INDEX", 0))
    kept = items[shard::shards]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
