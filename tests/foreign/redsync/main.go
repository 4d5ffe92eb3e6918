// Locks with redsync by the commands of holder.py; see there. It prints no time: the answer to a release is "freed".
package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
)

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	port, key := os.Args[1], os.Args[2]
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:" + port})
	locks := redsync.New(goredis.NewPool(client))
	mutex := func() *redsync.Mutex {
		return locks.NewMutex(key, redsync.WithExpiry(30*time.Second), redsync.WithTries(1500),
			redsync.WithRetryDelay(20*time.Millisecond))
	}
	var held *redsync.Mutex
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := append(strings.Fields(lines.Text()), "")
		switch {
		case words[0] == "count":
			times, err := strconv.Atoi(words[1])
			must(err)
			for range times {
				lock := mutex()
				must(lock.Lock())
				count, err := client.Get(context.Background(), key+":count").Int()
				if err != redis.Nil {
					must(err)
				}
				time.Sleep(2 * time.Millisecond)
				must(client.Set(context.Background(), key+":count", count+1, 0).Err())
				_, err = lock.Unlock()
				must(err)
			}
			fmt.Println("counted")
		case held != nil:
			lock := held
			held = nil
			if ok, _ := lock.Unlock(); ok {
				fmt.Println("freed")
			} else {
				fmt.Println("lost")
			}
		default:
			lock := mutex()
			var err error
			if words[0] == "try" {
				err = lock.TryLock()
			} else {
				err = lock.Lock()
			}
			if err == nil {
				held = lock
				fmt.Println("held")
			} else {
				fmt.Println("busy")
			}
		}
	}
}
