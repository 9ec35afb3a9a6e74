"""Rewards tried on answers that nobody sampled: does the gold win, and does anything else?"""
