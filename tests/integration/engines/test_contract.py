"""Our worker and our server keep the contract of all engines, with a stand-in for vLLM behind them."""

from dataclasses import replace

from contract import Contract
from interfaces import stand_in


class TestStandIn(Contract):
    spec = stand_in()


class TestStandInServer(Contract):
    spec = replace(stand_in(), interface="server")
