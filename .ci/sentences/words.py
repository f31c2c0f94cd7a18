"""Vocabulary of the rules: verbs that open a docstring, words that may not, denied constructions and names."""

from __future__ import annotations

import re

_VERBS = """
Abort Accept Accumulate Acquire Add Adjust Admit Advance Aggregate Agree Allocate Allow Analyse Annotate Announce
Answer Append Apply Approximate Arrange Assemble Assert Assign Attach Attempt Audit Authenticate Authorize
Back-propagate Balance Begin Bind Bisect Block Bound Branch Break Bring Broadcast Build Bundle Cache Calculate Call
Cancel Capture Carry Change Charge Check Choose Claim Clamp Classify Clean Clear Clip Clone Close Coarsen Collapse
Collect Combine Come Commit Compare Compile Complete Compose Compress Compute Concatenate Configure Confirm Connect
Construct Consume Continue Convert Copy Correct Count Create Cut Decide Decode Decompose Decompress Decrypt
Deduplicate Define Delay Delete Deliver Derive Describe Detach Detect Determine Disable Discard Dispatch Display
Distribute Divide Do Download Drain Draw Drop Dump Edit Embed Emit Enable Encode Encrypt End Enforce Ensure Enter
Enumerate Escape Estimate Evaluate Evict Exchange Exclude Execute Exit Expand Expect Expire Explain Explore Export
Extend Extract Fade Fail Fetch Fill Filter Find Finish Fit Fix Flatten Flush Fold Follow Forget Fork Format Forward
Free Freeze Gather Generate Get Give Go Grant Group Grow Guard Halve Handle Hash Have Help Hide Hold Identify Ignore
Implement Import Improve Include Increase Increment Infer Inherit Initialize Insert Inspect Install Interleave
Interpolate Interrupt Intersect Invalidate Invert Issue Iterate Join Judge Keep Kill Label Launch Lay Leave Let Limit
Link List Listen Load Locate Lock Log Loosen Lower Make Map Mark Mask Match Maximize Measure Meet Merge Migrate
Minimize Mirror Modify Monitor Move Multiply Name Narrow Negate Normalize Note Notify Obtain Offer Omit Open Optimize
Order Override Overwrite Pack Pad Parse Partition Pass Patch Pause Perform Permute Pick Pin Place Plan Plot Pop
Populate Post Postpone Predict Prefer Prepare Prepend Preserve Press Print Probe Produce Profile Propagate Propose
Protect Prove Provide Prune Publish Pull Push Put Query Queue Quote Raise Randomize Read Rebuild Receive Recompute
Record Recover Reduce Refer Refine Refresh Refuse Register Reject Relax Release Reload Remember Remove Rename Render
Renew Repair Repeat Replace Replay Reply Report Represent Reproduce Request Requeue Require Reserve Reset Resize
Resolve Restart Restore Restrict Resume Retry Return Reuse Reverse Rewrite Round Route Run Sample Save Scale Scan
Scatter Schedule Score Search Select Send Separate Serialize Serve Set Settle Shard Shift Shorten Show Shrink Shuffle
Shut Sign Simplify Simulate Skip Sleep Smooth Solve Sort Spawn Specify Split Spread Stack Start Stay Step Stop Store
Stream Strip Submit Substitute Subtract Sum Summarize Support Suspend Swap Switch Synchronize Tabulate Take Tear
Terminate Test Tighten Toggle Touch Trace Track Train Transfer Transform Translate Transpose Trim Truncate Try Turn
Undo Unfold Unlock Unpack Update Upgrade Upload Use Validate Verify Visit Wait Wake Walk Warm Warn Watch Weigh Widen
Wrap Write Yield
"""
VERBS = frozenset(_VERBS.split())
"""Imperative verbs; without ask, tell, say, know and want, which programs do not do."""

NOUN_AFTER = frozenset({"of", "bound", "bounds", "is", "are", "was"})
"""A second word that makes a noun of the first: "Count of stages", "Lower bound on the period"."""

_NO_OPENINGS = """
about above across after against along among around as at before behind below beneath beside besides between beyond
by despite down during except for from in inside into like near of off on onto out outside over past per since
through throughout till to toward towards under underneath unlike until up upon via with within without
what whatever when whenever where wherever whether which whichever who whoever whom whose why how however
although and because but if lest nor once or so than though unless while yet
it he she they we you that those there itself themselves everything everyone everybody something someone somebody
nothing nobody anything anyone anybody not never
is are was were be been has have had does do did can could may might must shall should will would
gives keeps makes says tells takes asks knows wants brings puts lets finds becomes sends receives writes decides
told said found given asked held made known taken
"""
NO_OPENINGS = frozenset(_NO_OPENINGS.split())
"""First words, in lower case, of no noun phrase: prepositions, question words, conjunctions, pronouns, finite verbs."""

CONSTRUCTIONS = re.compile(
    r"\b(?:that\s+there\s+(?:is|are)(?!\s+(?:an?|no|nothing|not|one|two|more|fewer|much|little|many|few|enough"
    r"|some|any|only|such|\d+)\b)"
    r"|those\s+that|those\s+of|that\s+of|as\s+far\s+as|of\s+its\s+own|all\s+the\s+same"
    r"|(?:is|are|has|have)\s+(?:none|no)(?=[.;:!?)]|\s*$)|nor\s+(?:have|has|is)|is\s+to\s+be)\b",
    re.IGNORECASE,
)
"""Constructions that lack a noun or a main clause.

``that there is`` passes before a noun phrase, as in "The error says ``that there is`` no plan".
"""

WORDS = re.compile(
    r"\b(?:twins?|told(?! apart)|hears?|heard|anew|dearer|farewell|stor(?:y|ies)|seats?|speaks?\s+of|weary"
    r"|way\s+there\s+and\s+back|comes?\s+up\s+for\s+air)\b",
    re.IGNORECASE,
)
"""Words that a word of the field replaces (docs/glossary.md)."""

_NAMES = "found given said asked held made own known taken told says weary opinion"
NAMES = frozenset(_NAMES.split())
"""Participles and verbs of speech, which name no thing."""

PARAMETERS = {"closely": "prove_bounds", "without": "excluded", "longest_ns": "upper_bound_ns"}
"""Parameters of public functions and fields that are no longer used, and the names that replaced them."""
