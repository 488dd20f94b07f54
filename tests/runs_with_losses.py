"""Runs over servers that die, and of `Serial` over host tables with the same losses."""

from click_model import ROWS, SPEC, TASK, batch_at, bits, fresh
from deaths import DeltaWrites, Late, Log, NotingPipeline, NotingSerial, of_losses

from jaxrec.cpr import Recovery, mfu, scar, ssu
from jaxrec.embedding import HostTables

LENGTH, EVERY = 24, 6
SCHEMES = {"vanilla": {}, "mfu": {"scheme": mfu(), "fraction": 0.5}, "ssu": {"scheme": ssu(1), "fraction": 0.5}}
SCHEMES |= {"scar": {"scheme": scar(), "fraction": 0.5}}


def run(engine, directory, scheme, fleet=None, gate=lambda index: None, failures=None, look=lambda engine, step: None):
    """Run with saves, calling look(engine, step) after each step and with None at the end; (bits, Log, recovery)."""

    def stream():
        for index in range(LENGTH):
            gate(index)
            yield batch_at(index)

    with engine:
        log = engine.enter(Log())
        if fleet:
            engine.enter(fleet)
        given = SCHEMES[scheme] | {"failures": failures or {}}
        recovery = engine.enter(Recovery(directory, EVERY, LENGTH, **given))
        engine.enter(Late())
        engine.enter(lambda info: look(engine, info.step))
        engine.train(stream())
        look(engine, None)
        recovery.save_whole()
        if fleet:
            fleet.fate = lambda *message: ""  # no faults while the result is read
        found = bits(engine.state)
    return found, log, recovery


def serially(directory, scheme, log=None, losses=None, voided=()):
    """Final bits of Serial over host tables that loses the same shards and deltas at the same steps."""
    losses, voided = (log.losses, log.voided) if log else (losses or {}, voided)
    tables, missed, failures = of_losses(losses, HostTables.create(SPEC, ROWS))
    engine = NotingSerial(TASK, fresh("host")._replace(tables=tables))
    engine.missed = missed
    with DeltaWrites(voided):
        return run(engine, directory, scheme, failures=failures)[0]


ENGINES = {"serial": lambda state, callbacks=(): NotingSerial(TASK, state, callbacks)}
ENGINES |= {"pipeline": lambda state, callbacks=(): NotingPipeline(TASK, state, callbacks, window=3)}
