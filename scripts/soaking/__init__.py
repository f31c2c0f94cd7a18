"""Soaks: deaths at random moments in ``training`` or the ``service``, and checks that everything recovers."""
