// `Holder.java <address> <path>`: an InterProcessMutex of Curator, by the commands of standard input: `lock`, `try`,
// `free`. Prints `ready`, `in`, `busy` and `out`, each behind its number.

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

public class Holder {
    public static void main(String[] args) throws Exception {
        CuratorFramework client =
            CuratorFrameworkFactory.newClient(args[0], 20000, 20000, new RetryOneTime(100));
        client.start();
        client.blockUntilConnected();
        InterProcessMutex mutex = new InterProcessMutex(client, args[1]);
        say("ready");
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in));
        for (String order = orders.readLine(); order != null; order = orders.readLine()) {
            switch (order) {
                case "lock":
                    mutex.acquire();
                    say("in");
                    break;
                case "try":
                    say(mutex.acquire(0, TimeUnit.MILLISECONDS) ? "in" : "busy");
                    break;
                default:
                    mutex.release();
                    say("out");
            }
        }
        client.close();
    }

    private static int said = 0;

    private static void say(String word) {
        System.out.println(said++ + " " + word);
        System.out.flush();
    }
}
