// A worker of the benches: etcd's Go client with its mutex. The lines and the log are those of benches/src/worker.rs.
//
// mutex ENDPOINTS PREFIX TASKS MICROSECONDS OWN LOG: TASKS goroutines with a session each lock and unlock, and stay inside
// for so long. The key is one for all, or with OWN = true one for each.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"golang.org/x/sys/unix"
)

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// Nanoseconds of the clock that all processes share.
func now() uint64 {
	var time unix.Timespec
	must(unix.ClockGettime(unix.CLOCK_MONOTONIC, &time))
	return uint64(time.Nano())
}

func number(text string) uint64 {
	value, err := strconv.ParseUint(text, 10, 64)
	must(err)
	return value
}

func main() {
	endpoints, prefix, tasks := strings.Split(os.Args[1], ","), os.Args[2], int(number(os.Args[3]))
	body, own, log := time.Duration(number(os.Args[4]))*time.Microsecond, os.Args[5] == "true", os.Args[6]
	client, err := clientv3.New(clientv3.Config{Endpoints: endpoints})
	must(err)
	session, err := concurrency.NewSession(client, concurrency.WithTTL(30))
	must(err)
	sessions := []*concurrency.Session{session}
	// Two mutexes of one key and one session are the same owner.
	for !own && len(sessions) < tasks {
		session, err := concurrency.NewSession(client, concurrency.WithTTL(30))
		must(err)
		sessions = append(sessions, session)
	}
	fmt.Println("ready")
	lines := bufio.NewScanner(os.Stdin)
	lines.Scan()
	span := strings.Fields(lines.Text())
	begin, end := number(span[0]), number(span[1])
	records := make([]bytes.Buffer, tasks)
	var all sync.WaitGroup
	for task := range tasks {
		all.Go(func() {
			key := prefix
			if own {
				key = fmt.Sprintf("%s-%d", prefix, task)
			}
			mutex := concurrency.NewMutex(sessions[task%len(sessions)], key)
			time.Sleep(time.Duration(int64(begin) - int64(now())))
			for {
				asked := now()
				if asked >= end {
					return
				}
				must(mutex.Lock(context.Background()))
				entered := now()
				time.Sleep(body)
				left := now()
				must(mutex.Unlock(context.Background()))
				must(binary.Write(&records[task], binary.LittleEndian, []uint64{uint64(task), asked, entered, left}))
			}
		})
	}
	all.Wait()
	file, err := os.Create(log)
	must(err)
	for task := range records {
		_, err := records[task].WriteTo(file)
		must(err)
	}
	must(file.Close())
}
