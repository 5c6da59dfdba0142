"""Checks that need a GPU: ``odc bench gpu``.

``catalogue`` lists the checks, ``isolation`` runs each in a process group of its own, ``ranks`` starts ranks inside it.
The bodies are in the modules of the checks' names; most take a device and a transport as parameters and use streams
through ``streams``, so that the tests run them on a CPU, on a transport that poses as a GPU.
"""
