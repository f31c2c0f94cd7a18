"""Duties that one worker of a database fulfils once an hour on behalf of all."""

from __future__ import annotations

import logging

from penstock.service.db.database import Database
from penstock.service.db.upkeep.pruning import prune
from penstock.service.jobs.sweep_tables import SweepTables
from penstock.service.settings import Settings

log = logging.getLogger("penstock.service")


def do_hourly(database: Database, settings: Settings) -> None:
    """Store the tables of sweeps that have ended, and remove what ended ``keep_jobs_days`` ago."""
    SweepTables(database).settle_open()
    if settings.keep_jobs_days and (gone := prune(database, settings.keep_jobs_days)):
        log.info("what ended more than %g days ago is gone: %s", settings.keep_jobs_days, gone)
