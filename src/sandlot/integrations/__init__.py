"""Sandlot inside other frameworks: a module for each, which that framework finds and loads."""
