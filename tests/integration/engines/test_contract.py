"""Our worker and our server keep the contract of all engines, with a stand-in for vLLM behind them."""

from dataclasses import replace

from contract import WORKLOAD, Contract
from interfaces import stand_in

from pytest_slmserve.schema.specs import OpenLoop


class TestStandIn(Contract):
    spec = stand_in()

    def test_it_may_be_closed_twice(self, engine):
        """The last one on this engine."""
        engine.run(WORKLOAD, OpenLoop(requests=2))
        engine.close()
        engine.close()
        assert not engine.ready


class TestStandInServer(Contract):
    spec = replace(stand_in(), interface="server")
