"""Capacity and cost before anything is rented: a model of a refit, its calibration, and its prices."""
