"""All time limits and polling intervals of ODC, in seconds.

Users set only one limit: ``timeout_s`` (:class:`odc.RuntimeConfig`), the time without progress of an awaited rank. The
values here decide how soon a failure is noticed, how long ODC waits for its explanation, and how much checking costs.
"""

from __future__ import annotations

# Waits for other ranks

WAIT_SLEEP_S = 0.1
"""Longest sleep of a wait: a signal wakes it, a death wakes nobody."""
ABSENCE_S = 2.0
"""Between two looks: longer, and this process was not running, so that nobody else is to blame for that time."""
STATUS_S = 1.0
"""How often a rank tells other hosts of its progress."""
STATUS_LAG_S = 2.0
"""What a rank of another host is granted beyond the limit, since its progress is told once in a while."""
FIRST_REMINDER_S = 10.0
"""After which a wait is first told of, then after twice that, and so on."""
COLLECTIVE_FIRST_LOOK_S = 0.1
"""Before it, a collective is looked at only for failures."""
COLLECTIVE_STUCK_S = 3.0
"""For which nobody works until a rank that is in a collective of all ranks, and waited for outside of it, is not waited
for any more."""
STUCK_BEATS = 3
"""Of the watchdog of the last of ranks that wait for each other, until they are taken for stuck: its process runs."""
FENCE_AWAY_S = 1.0
"""For which no other rank has worked (each waits, or is gone) until a fence is left to go into a collective first;"""
FENCE_STUCK_S = 3.0
"""or until it fails, where there is nothing else to do: they are not on their way to it."""
FENCE_UNSEEN_FACTOR = 10.0
"""Both are longer where some ranks of the job are not seen: one that works may be waited for in a collective."""
LOCK_SLICE_S = 0.05
"""Longest sleep on the lock of a sum."""

# Pauses between looks, where nothing wakes who waits: the first one, and what doubling it ends at

LOOK_PAUSES_S = 20e-6, 2e-3
DEVICE_PAUSES_S = 50e-6, 500e-6
"""Of an owner's daemon, for what a device has yet to do."""
SLOT_PAUSE_S = 200e-6
"""Of a client, for a slot: it takes a while."""
STORE_PAUSES_S = 1e-4, 5e-3
"""For who has come to an exchange."""
SEMAPHORE_PAUSE_S = 1e-4
STREAM_PAUSE_S = 1e-3
CLOSE_PAUSE_S = 2e-3

# A failure, and what explains it

FAILURE_GRACE_S = 1.0
"""For which a failure is left to the training loop, which can say better what it was doing."""
EXPLANATION_S = 3.0
"""For which a broken collective waits for news that explain it."""
CLOSED_S = 1.0
"""For which a collective waits for a rank that has closed: what it gave may be on its way, or others explain more."""
EXPLANATION_PAUSE_S = 0.02
LINK_EXPLANATION_S = 5.0
"""For which the end of a connection's data waits for a control frame that explains it."""
LINK_SLICE_S = 0.5
"""Between two looks of a transfer at aborts, deaths and the clock."""
DEATH_LOOK_S = 1.0
"""Of the watchdog of streams: a death wakes it at once, an error that a living rank has told of is found by looking."""
BEAT_S = 0.5
"""How often the watchdog of a job shows that this process runs, and looks."""

# The daemon

DAEMON_IDLE_S = 1.0
"""Longest sleep of a daemon without work."""
DAEMON_PATIENCE_S = 1.0
"""For which a client on a device waits for a free slot before it keeps its push: the owner may be stuck in a collective
of the script. On a host nothing can hold up an owner's thread."""
DAEMON_GLANCE_S = 2e-3
"""For which a client looks for a slot before it waits with all that belongs to a wait."""

# Set-up

SETUP_LEAST_TIMEOUT_S = 600.0
STORE_BEGIN_S = 60.0
"""With the store of the process group, where there is nothing else to say;"""
STORE_PATIENCE_S = 2.0
"""where there is."""
STORE_SLICE_S = 0.02
"""Between two looks at failures, while the store is asked."""
LOSSES_LOOK_S = 0.5
"""Between two looks for ranks that have ended;"""
WORDS_LOOK_S = 5.0
"""for ranks that have failed and go on."""
ABSENT_MOMENT_S, ABSENT_PAUSE_S = 2.0, 0.1
"""For others to come, or to end, which they may be about to."""
PART_MOMENT_S = 0.5
"""For which an exchange goes on without a rank that has ended: it may have brought its part before."""
CALL_S = 30.0
"""For a connection to another host: beyond that something swallows the packets."""
DOCTOR_SLEEP_S = 10.0
"""For a thread to wake, in ``odc doctor``: it takes no time, but a machine may be busy."""

# The end

CLOSE_GRACE_S = 2.0
"""For which ``close()`` itself waits for the others to close, too; a thread does then."""
CLOSE_DEVICE_S = 30.0
"""For a device to come to rest: work of the last minibatch may still be under way."""
STAY_S = 5.0
"""For which a process whose script is over stays behind the last sign of progress of a reader."""
