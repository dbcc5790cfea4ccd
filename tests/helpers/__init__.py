"""Test modules import shared code from here, never from each other."""
