"""The task service of the recorded cases: writes down each call and answers as the original's service did."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RecordingService:
    def act_as_worker(self, ctx: object, *, task_id: str, action: Mapping[str, Any]) -> dict[str, Any]:
        return self._called("act_as_worker", task_id=task_id, action=action)

    def warn(self, ctx: object, *, task_id: str, kind: str) -> dict[str, Any]:
        return self._called("warn", task_id=task_id, kind=kind)

    def expire_transfers(self, ctx: object, *, task_id: str) -> dict[str, Any]:
        return self._called("expire_transfers", task_id=task_id)

    def _called(self, method: str, **input: Any) -> dict[str, Any]:
        with Path(os.environ["CALLS"]).open("a") as calls:
            calls.write(json.dumps({"method": method, "input": input}) + "\n")
        task_id = input["task_id"]
        if task_id.startswith("boom"):
            raise RuntimeError(f"boom for {task_id}")
        return {"ok": not task_id.startswith("noop")}


service = RecordingService()
