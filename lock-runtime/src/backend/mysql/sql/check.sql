SELECT `key`, owner, until, fence, last_fence, channel, contended FROM lock_lease LIMIT 0;
SELECT `key`, owner, position, channel, seen FROM lock_queue LIMIT 0
/*pin ; SELECT `key`, fence FROM lock_fence LIMIT 0 pin*/
