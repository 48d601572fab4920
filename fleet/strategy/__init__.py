"""Defines what a user may ask of a job, as values: one file for each kind of job. Pure."""

from fleet.strategy.parameter_server import Strategy, StrategyFactory

__all__ = ["Strategy", "StrategyFactory"]
