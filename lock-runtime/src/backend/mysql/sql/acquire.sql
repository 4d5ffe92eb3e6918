-- Grants each key that is free, expired or the owner's already. The keys are distinct and sorted.
-- :rows for each request (key, owner, end of the lease, fence, last fence, channel, text about the owner)
-- Assignments see those before them: an expired lease first becomes free, and the new owner is assigned last.
INSERT INTO lock_lease (`key`, owner, until, fence, last_fence, channel /*info , info info*/) VALUES :rows
ON DUPLICATE KEY UPDATE
    owner = IF(until <= @now, '', owner),
    -- A request by the present owner is a retry: it gets the same fence, and never shortens the lease.
    last_fence = CASE owner
        WHEN VALUES(owner) THEN GREATEST(last_fence, fence + VALUES(last_fence) - VALUES(fence))
        WHEN '' THEN GREATEST(last_fence + 1, @now) + VALUES(last_fence) - VALUES(fence)
        ELSE last_fence END,
    fence = IF(owner = '', last_fence - VALUES(last_fence) + VALUES(fence), fence),
    channel = IF(owner IN ('', VALUES(owner)), VALUES(channel), channel),
    /*info info = IF(owner IN ('', VALUES(owner)), VALUES(info), info), info*/
    -- The end of a free row is when it became free, which is later than now if the clock was set back.
    until = CASE owner WHEN VALUES(owner) THEN GREATEST(until, VALUES(until)) WHEN '' THEN VALUES(until) ELSE until END,
    owner = IF(owner = '', VALUES(owner), owner)
