"""Checks that need a GPU: ``odc bench gpu``.

``gpu`` lists the checks. ``setting`` runs each check in a process group of its own, and starts its ranks. Most checks
take a device and a transport as parameters and use streams through ``streams``, so that the tests run them on a CPU, on
a transport that poses as a GPU.
"""
