-- Grants each key that is free, expired or the owner's already. The keys are distinct and sorted.
-- :rows for each request (key, owner, end of the lease, fence, last fence, channel, text about the owner)
-- Assignments see those before them: the owner is assigned when the fences are, and decides about the end.
INSERT INTO lock_lease (`key`, owner, until, fence, last_fence, channel /*info , info info*/) VALUES :rows
ON DUPLICATE KEY UPDATE
    -- A request by the present owner is a retry: it gets the same fence, and never shortens the lease.
    last_fence = CASE
        WHEN owner = VALUES(owner) AND until > @now
            THEN GREATEST(last_fence, fence + VALUES(last_fence) - VALUES(fence))
        WHEN owner = '' OR until <= @now
            THEN GREATEST(last_fence + 1, @now) + VALUES(last_fence) - VALUES(fence)
        ELSE last_fence END,
    fence = CASE
        WHEN owner = VALUES(owner) AND until > @now THEN fence
        WHEN owner = '' OR until <= @now THEN last_fence - VALUES(last_fence) + VALUES(fence)
        ELSE fence END,
    channel = IF(owner IN ('', VALUES(owner)) OR until <= @now, VALUES(channel), channel),
    /*info info = IF(owner IN ('', VALUES(owner)) OR until <= @now, VALUES(info), info), info*/
    owner = IF(owner = '' OR until <= @now, VALUES(owner), owner),
    until = IF(owner = VALUES(owner), GREATEST(until, VALUES(until)), until)
